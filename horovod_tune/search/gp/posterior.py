"""What is believed about the objective when a suggestion is made: results, failures and points in flight.

Targets are to be maximised here, whatever the search's mode.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from bayes_opt.acquisition import AcquisitionFunction, ExpectedImprovement, ProbabilityOfImprovement
from numpy.typing import NDArray
from scipy.stats import norm, qmc

from horovod_tune.search.gp import fit as gp_fit
from horovod_tune.search.gp.acquisition import LogExpectedImprovement
from horovod_tune.search.gp.failure_model import Safety
from horovod_tune.search.gp.fit import Conditioned, Fit, MarginalLikelihood, Priors
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


class FitState(NamedTuple):
    """What a later fit starts from, and a saved search keeps: JSON values."""

    theta: list[float]
    #: The number of the scale that the results were on.
    scale: int
    #: How many results there were when a fit last started from scratch.
    fresh_at: int
    #: A digest of what was fitted.
    data: str


#: What the logarithm of the posterior density must gain for axes to be bent.
_BEND_LEAD = 5.0
#: To so few results a fit always starts from scratch.
_ALWAYS_FRESH = 60
#: Otherwise it does when there are this many times the results of the last one that did.
_FRESH_GROWTH = 1.25
#: Steps of a fit that goes on from an earlier one: to tell the scales apart, and on the scale that is used.
_WARM_STEPS, _WARM_STEPS_BEST = 6, 15


class FittedModel:
    """The covariance and scaling that a set of results gives; points in flight do not change them.

    `earlier` is the state of a fit to fewer results. Where it is of the same ones, nothing is fitted. Where
    `timed`, the results are reports, and the last feature is their time.
    """

    def __init__(
        self,
        features: FloatArray,
        targets: FloatArray,
        groups: NDArray[np.int_],
        options: ModelOptions,
        bendable: NDArray[np.bool_] | None = None,
        earlier: FitState | None = None,
        timed: bool = False,
    ) -> None:
        self._bendable, self._timed = bendable, timed
        self.state: FitState | None = None
        kept = thin(targets, options.process_points)
        self.features, self.groups, self.options = features[kept], groups, options
        own = options.kernel is None and options.fixed_noise is None
        found = list(scales(targets[kept], options.linear_depth, options.softnesses if own else ()))
        # Each scale keeps the order, so these are the same points on all.
        few = thin(found[0].targets, options.fit_points)
        if options.kernel is not None:
            alpha = _KERNEL_ALPHA if options.fixed_noise is None else options.fixed_noise
            own_scale, chosen = found[0].targets[few], found[0]
            self.covariance: Covariance = gp_fit.fit_kernel(
                options.kernel, self.features[few], own_scale, alpha, options.starts - 1
            )
        else:
            number, fitted = self._fit(found, few, earlier)
            chosen = found[number]
            self.covariance = MaternCovariance(fitted, groups, timed)
        self.targets, self.offset, self.scale = chosen.targets, chosen.offset, chosen.deviation

    def _fit(
        self, found: list[Scale], few: NDArray[np.int_], earlier: FitState | None
    ) -> tuple[int, Hyperparameters]:
        """Return the number of the most probable scale and the hyperparameters on it."""
        options, features, rows = self.options, self.features[few], len(self.features)
        priors, noise = options.priors, options.fixed_noise
        data = hashlib.sha1(features.tobytes() + found[0].targets[few].tobytes() + repr(options).encode())
        digest = data.hexdigest()

        def fit(
            scale: Scale, starts: range, warm: FloatArray | None = None, steps: int = 60, bend: bool = False
        ) -> Fit:
            bendable = self._bendable if bend else None
            targets = scale.targets[few]
            return gp_fit.fit(
                features, targets, self.groups, priors, noise, starts, bendable, warm, steps, self._timed
            )

        straight = len(MarginalLikelihood(features, found[0].targets[few], self.groups, priors, noise).bounds)
        bends = 0 if self._bendable is None else int(self._bendable.sum())
        warm, bent, fresh_at = None, False, rows
        if earlier is not None and earlier.scale < len(found):
            theta = np.asarray(earlier.theta)
            bent = len(theta) > straight
            if len(theta) == straight + bent * bends:
                if earlier.data == digest:
                    self.state = earlier
                    bendable = self._bendable if bent else None
                    targets = found[earlier.scale].targets[few]
                    objective = MarginalLikelihood(features, targets, self.groups, priors, noise, bendable)
                    return earlier.scale, objective.hyperparameters(theta)
                if _ALWAYS_FRESH < rows < _FRESH_GROWTH * earlier.fresh_at:
                    warm, fresh_at = theta, earlier.fresh_at
        bent = bent and warm is not None
        # One start tells scales apart well enough; the others are for the scale that is used.
        steps = 60 if warm is None else _WARM_STEPS
        fits = [fit(scale, range(1), warm, steps, bent) for scale in found]
        posteriors = [
            fitted.log_posterior + scale.log_slopes[few].sum() + scale.log_prior
            for fitted, scale in zip(fits, found, strict=True)
        ]
        best = int(np.argmax(posteriors))
        fitted = fits[best]
        if warm is not None:
            fitted = fit(found[best], range(1), fitted.theta, _WARM_STEPS_BEST, bent)
        else:
            if options.starts > 1:
                others = fit(found[best], range(1, options.starts))
                fitted = max(fitted, others, key=lambda f: f.log_posterior)
            if bends:
                start = np.concatenate([fitted.theta, np.zeros(bends)])
                curved = fit(found[best], range(1), start, 60, bend=True)
                if curved.log_posterior > fitted.log_posterior + _BEND_LEAD:
                    fitted = curved
        self.state = FitState([float(t) for t in fitted.theta], best, fresh_at, digest)
        return best, fitted.hyperparameters

    def condition(self) -> Conditioned:
        """Return the process given the results alone, its targets standardised."""
        noise = np.full(len(self.features), self.covariance.noise)
        # What comes from outside is fitted without a mean, as scikit-learn does it.
        mean = None if self.options.kernel is None else 0.0
        return Conditioned(self.features, self.targets[:, None], noise, self.covariance, mean)


_NOTHING = np.empty(0)


class Posterior:
    """An acquisition function over the model space, knowing the points in flight and the failures.

    `pending` has the shape (points, features). `context` are features that every query shares, after its own:
    the time at which learning curves are looked at. Without `draw_results` what was observed is taken as
    it is, noise apart, and only what is in flight is drawn.
    """

    def __init__(
        self,
        model: FittedModel,
        pending: FloatArray,
        safety: Safety | None,
        acquisition: AcquisitionFunction,
        seed: int,
        context: FloatArray = _NOTHING,
        draw_results: bool = True,
    ) -> None:
        self._safety, self._context = safety, context
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
        if not model.options.draws or len(points) > 400:
            targets = np.concatenate([model.targets, known.predict(pending)[0][:, 0]])[:, None]
        elif draw_results:
            targets = _draws(known, points, model.options.draws, seed)
            noise = np.full(len(model.features), 1e-6)
        elif len(pending):
            drawn = _draws(known, pending, model.options.draws, seed)
            targets = np.concatenate([np.tile(model.targets[:, None], drawn.shape[1]), drawn])
        else:
            targets = model.targets[:, None]
        noise = np.concatenate([noise, np.full(len(pending), 1e-6 if len(noise) == 0 else noise.min())])
        self._process = Conditioned(points, targets, noise, model.covariance, mean=known.mean)
        best = targets if draw_results and targets.shape[1] > 1 else self._process.predict(points)[0]
        self.incumbents = best.max(axis=0)

    def means(self, features: FloatArray) -> FloatArray:
        """Return the mean over the draws at `features`, shape (queries, features): shape (queries,)."""
        return self._process.predict(self._in_context(features))[0].mean(axis=1)

    def _in_context(self, features: FloatArray) -> FloatArray:
        if not len(self._context):
            return features
        return np.concatenate([features, np.tile(self._context, (len(features), 1))], axis=1)

    def __call__(self, features: FloatArray) -> FloatArray:
        """Return the acquisition, shape (queries,), at `features`, shape (queries, features)."""
        means, stds = self._process.predict(self._in_context(features))
        values = self._average(self._values(means, np.broadcast_to(stds[:, None], means.shape)))[0]
        if self._safety is not None:
            log_safe = self._safety.log_probability(features)
            values = values * np.exp(log_safe) if self._multiplied else values + self._unit * log_safe
        return values

    def with_slope(self, query: FloatArray) -> tuple[float, FloatArray]:
        """Return the acquisition at one query, shape (features,), and its gradient."""
        here = np.concatenate([query, self._context])
        means, std, mean_slopes, std_slope = self._process.predict_with_slopes(here)
        mean_slopes, std_slope = mean_slopes[: len(query)], std_slope[: len(query)]
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
