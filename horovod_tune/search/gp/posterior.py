"""What is believed about the objective when a suggestion is made: results, failures and points in flight.

Targets are to be maximised here, whatever the search's mode.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from bayes_opt.acquisition import AcquisitionFunction, ExpectedImprovement, ProbabilityOfImprovement
from numpy.typing import NDArray
from scipy.stats import norm, qmc

from horovod_tune.search.gp import fit as gp_fit
from horovod_tune.search.gp.acquisition import LogExpectedImprovement, log_probability_below
from horovod_tune.search.gp.fit import Conditioned, Fit, Priors
from horovod_tune.search.gp.kernels import Covariance, FloatArray, Hyperparameters, MaternCovariance
from horovod_tune.search.gp.output_scales import Scale, scales


@dataclass(frozen=True)
class ModelOptions:
    """How the Gaussian process is built; the defaults are what the benchmark chose."""

    #: None is ours, with the `priors` and a noise that is estimated unless it is fixed. A kernel of
    #: scikit-learn comes without both.
    kernel: Any = None
    priors: Priors = field(default_factory=Priors)
    fixed_noise: float | None = None
    starts: int = 2
    #: Joint draws of what is in flight and what is noisy; 0 takes the posterior mean (kriging believer).
    draws: int = 16
    #: More points than this are thinned out for the fit of the hyperparameters, and for the process.
    fit_points: int = 150
    process_points: int = 1000
    #: How far below the median, in units of median to best, targets are taken as they are.
    linear_depth: float = 3.0
    #: The warped scales that are tried beside the results' own, see `warping`; not for acquisition functions
    #: that have a number on the objective's scale. A `kernel` and `fixed_noise` have one too: none are tried.
    softnesses: tuple[float, ...] = ()


def thin(targets: FloatArray, limit: int) -> NDArray[np.int_]:
    """Return the indices of at most `limit` points: the best half, and the rest spread over time."""
    if len(targets) <= limit:
        return np.arange(len(targets))
    order = np.argsort(-targets, kind="stable")
    best, others = order[: limit // 2], np.sort(order[limit // 2 :])
    spread = others[np.linspace(0, len(others) - 1, limit - limit // 2).astype(int)]
    return np.sort(np.concatenate([best, spread]))


#: The noise beside a kernel of the user's own, bayesian-optimization's default.
_KERNEL_ALPHA = 1e-6


class FittedModel:
    """The covariance and scaling that a set of results gives; points in flight do not change them."""

    def __init__(
        self, features: FloatArray, targets: FloatArray, groups: NDArray[np.int_], options: ModelOptions
    ) -> None:
        kept = thin(targets, options.process_points)
        self.features, self.groups, self.options = features[kept], groups, options
        own = options.kernel is None and options.fixed_noise is None
        found = list(scales(targets[kept], options.linear_depth, options.softnesses if own else ()))
        # Each scale keeps the order, so these are the same points on all.
        few = thin(found[0].targets, options.fit_points)
        chosen, self.covariance = self._fit(found, few)
        self.targets, self.offset, self.scale = chosen.targets, chosen.offset, chosen.deviation

    def _fit(self, found: list[Scale], few: NDArray[np.int_]) -> tuple[Scale, Covariance]:
        """Return the most probable scale and the covariance fitted on it."""
        options, features = self.options, self.features[few]
        if options.kernel is not None:
            alpha = _KERNEL_ALPHA if options.fixed_noise is None else options.fixed_noise
            targets = found[0].targets[few]
            return found[0], gp_fit.fit_kernel(options.kernel, features, targets, alpha, options.starts - 1)

        def fit(scale: Scale, starts: range) -> Fit:
            targets = scale.targets[few]
            return gp_fit.fit(features, targets, self.groups, options.priors, options.fixed_noise, starts)

        # One start tells scales apart well enough; the others are for the scale that is used.
        fits = [fit(scale, range(1)) for scale in found]
        posteriors = [
            fitted.log_posterior + scale.log_slopes[few].sum() + scale.log_prior
            for fitted, scale in zip(fits, found, strict=True)
        ]
        best = int(np.argmax(posteriors))
        fitted = fits[best]
        if options.starts > 1:
            fitted = max(fitted, fit(found[best], range(1, options.starts)), key=lambda f: f.log_posterior)
        return found[best], MaternCovariance(fitted.hyperparameters, self.groups)

    def condition(self) -> Conditioned:
        """Return the process given the results alone, its targets standardised."""
        noise = np.full(len(self.features), self.covariance.noise)
        # What comes from outside is fitted without a mean, as scikit-learn does it.
        mean = None if self.options.kernel is None else 0.0
        return Conditioned(self.features, self.targets[:, None], noise, self.covariance, mean)


class Posterior:
    """An acquisition function over the model space, knowing the points in flight and the failures.

    `pending` and `failed` have the shape (points, features).
    """

    def __init__(
        self,
        model: FittedModel,
        pending: FloatArray,
        failed: FloatArray,
        acquisition: AcquisitionFunction,
        seed: int,
    ) -> None:
        self._model, self._acquisition = model, acquisition
        self._logarithmic = isinstance(acquisition, LogExpectedImprovement)
        # Expectations and probabilities are multiplied by the probability that the trial does not fail,
        # their logarithms get its logarithm added, and so do bounds, in the objective's unit.
        improvement = isinstance(acquisition, (ExpectedImprovement, ProbabilityOfImprovement))
        self._multiplied = improvement and not self._logarithmic
        self._unit = 1.0 if self._logarithmic else model.scale
        noise = np.full(len(model.features), model.covariance.noise)
        known = model.condition()
        points = np.concatenate([model.features, pending])
        if model.options.draws and len(points) <= 400:
            targets = _draws(known, points, model.options.draws, seed)
            noise = np.full(len(model.features), 1e-6)
        else:
            targets = np.concatenate([model.targets, known.predict(pending)[0][:, 0]])[:, None]
        noise = np.concatenate([noise, np.full(len(pending), noise[0])])
        self._process = Conditioned(points, targets, noise, model.covariance, mean=known.mean)
        best = targets if targets.shape[1] > 1 else self._process.predict(points)[0]
        self.incumbents = best.max(axis=0)
        self._safety = _Safety(model, failed) if len(failed) else None

    def __call__(self, features: FloatArray) -> FloatArray:
        """Return the acquisition, shape (queries,), at `features`, shape (queries, features)."""
        means, stds = self._process.predict(features)
        values = self._average(self._values(means, np.broadcast_to(stds[:, None], means.shape)))[0]
        if self._safety is not None:
            log_safe = self._safety.log_probability(features)
            values = values * np.exp(log_safe) if self._multiplied else values + self._unit * log_safe
        return values

    def with_slope(self, query: FloatArray) -> tuple[float, FloatArray]:
        """Return the acquisition at one query, shape (features,), and its gradient."""
        means, std, mean_slopes, std_slope = self._process.predict_with_slopes(query)
        # Any acquisition function of bayesian-optimization, so its two partial derivatives are numerical.
        step = 1e-5 * std
        m = np.stack([means, means + step, means - step, means, means])
        s = np.full_like(m, std)
        s[3] += step
        s[4] -= step
        values = self._values(m, s)
        value, weights = self._average(values[:1])
        by_mean = (values[1] - values[2]) / (2 * step) * weights[0]
        by_std = float(np.sum((values[3] - values[4]) / (2 * step) * weights[0]))
        total, slope = float(value[0]), mean_slopes @ by_mean + std_slope * by_std
        if self._safety is not None:
            log_safe, safe_slope = self._safety.with_slope(query)
            if self._multiplied:
                safe = float(np.exp(log_safe))
                total, slope = total * safe, safe * (slope + total * safe_slope)
            else:
                total, slope = total + self._unit * log_safe, slope + self._unit * safe_slope
        return total, slope

    def _values(self, means: FloatArray, stds: FloatArray) -> FloatArray:
        """Return the acquisition of each draw, in the objective's own units, of the shape of `means`."""
        scale, offset = self._model.scale, self._model.offset
        if isinstance(self._acquisition, LogExpectedImprovement):
            # Invariant under a change of units, apart from a constant.
            self._acquisition.y_max = self.incumbents
            return self._acquisition.base_acq(means, stds)
        if isinstance(self._acquisition, (ExpectedImprovement, ProbabilityOfImprovement)):
            self._acquisition.y_max = self.incumbents * scale + offset
        return self._acquisition.base_acq(means * scale + offset, stds * scale)

    def _average(self, values: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the average over the draws, and how much each draw's value moves it."""
        if not self._logarithmic:
            return values.mean(axis=1), np.full_like(values, 1.0 / values.shape[1])
        top = values.max(axis=1, keepdims=True)
        parts = np.exp(values - top)
        sums = parts.sum(axis=1, keepdims=True)
        return top[:, 0] + np.log(sums[:, 0] / values.shape[1]), parts / sums


def _draws(known: Conditioned, points: FloatArray, number: int, seed: int) -> FloatArray:
    """Return joint quasi-random draws of the noise-free objective at `points`, shape (points, draws)."""
    mean, covariance = known.predict_joint(points)
    values, vectors = np.linalg.eigh(covariance)
    kept = values > 1e-10 * max(float(values[-1]), 1e-12)
    root = vectors[:, kept] * np.sqrt(values[kept])
    uniform = qmc.Sobol(root.shape[1], seed=np.random.default_rng(seed)).random(number)
    return mean + root @ norm.ppf(np.clip(uniform, 1e-9, 1 - 1e-9)).T


#: A place is safe where the modelled label (0 for a result, 1 for a failure) is below the first with enough
#: probability; the second keeps the edge soft; the third is the length scale, times the square root of
#: the number of parameters.
_TOLERATED, _BLUR, _FAILURE_LENGTH = 0.3, 0.05, 0.5
#: The probability counts to this power: a failed trial costs more than its place in the budget.
_CAUTION = 3.0


class _Safety:
    """The probability that a trial does not fail, from a Gaussian process on failed or not."""

    def __init__(self, model: FittedModel, failed: FloatArray) -> None:
        features = np.concatenate([model.features, failed])
        labels = np.concatenate([np.zeros(len(model.features)), np.ones(len(failed))])
        count = int(model.groups.max()) + 1 if len(model.groups) else 0
        lengths = np.full(count, _FAILURE_LENGTH * max(1, count) ** 0.5)
        covariance = MaternCovariance(Hyperparameters(lengths, 0.25, 0.01), model.groups)
        noise = np.full(len(labels), covariance.noise)
        self._process = Conditioned(features, labels[:, None], noise, covariance, mean=float(labels.mean()))

    def log_probability(self, features: FloatArray) -> FloatArray:
        """Return the logarithm of the probability of not failing, shape (queries,)."""
        means, stds = self._process.predict(features)
        return _CAUTION * log_probability_below(_TOLERATED, means[:, 0], np.sqrt(stds**2 + _BLUR**2))

    def with_slope(self, query: FloatArray) -> tuple[float, FloatArray]:
        """Return the same at one query, and its gradient, shape (features,)."""
        mean, std, mean_slope, std_slope = self._process.predict_with_slopes(query)
        total = np.sqrt(std**2 + _BLUR**2)
        z = (_TOLERATED - mean[0]) / total
        log_p = log_probability_below(_TOLERATED, mean[:1], np.asarray([total]))[0]
        ratio = np.exp(norm.logpdf(z) - log_p)
        slope = ratio * (-mean_slope[:, 0] / total - z / total * (std / total) * std_slope)
        return _CAUTION * float(log_p), _CAUTION * slope
