r"""The Gaussian process fitted to a set of results: its hyperparameters, and the scale of the results.

Losses of training runs differ by powers of ten far from the best ones, but only by a few percent near them.
A warped scale :math:`t = -\log(g + c)` spreads the best results, where :math:`g` is a result's distance from
the best one, in units of the distance from the median to the best; a smaller softness :math:`c` spreads them
more. It spreads noise too, so the scale is used under which the results are most probable, the Jacobian of
the transformation included (Snelson, Rasmussen & Ghahramani, 2004, "Warped Gaussian Processes", section 3).
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_tune.search.gp.fit import Conditioned, MarginalLikelihood, draws, fit
from horovod_tune.search.gp.kernels import FloatArray, Hyperparameters, MaternCovariance, Task, linear

#: The softnesses that are tried besides the results' own scale, if the acquisition function allows it.
SOFTNESSES = (1.0, 0.1)
#: This times log10(10 / softness) is subtracted from the log posterior of a warped scale, so that none wins
#: by chance, which costs most if results are noisy.
_PENALTY = 2.0


@dataclass(frozen=True)
class Scale:
    """Results on one scale: `targets` have mean 0 and deviation 1, and are `(t - offset) / deviation`.

    `log_slopes` are the log derivatives of `targets` with respect to the results; both have shape (points,).
    """

    targets: FloatArray
    offset: float
    deviation: float
    log_slopes: FloatArray
    #: Added to the log posterior of the model.
    log_prior: float = 0.0


def scales(results: FloatArray, depth: float, softnesses: Sequence[float]) -> Iterator[Scale]:
    """Yield `results`, shape (points,), larger being better, on their own scale and on the warped ones.

    On their own scale, results below the median by more than `depth` times the distance from the median to
    the best are compressed logarithmically. If at least half of them equal the best, distances have no unit,
    and there is no other scale.

    >>> own, *_ = scales(np.array([0.0, 1.0, 2.0, -100.0, 1.0]), 3.0, ())
    >>> (own.targets * own.deviation + own.offset).round(2).tolist()
    [0.0, 1.0, 2.0, -6.6, 1.0]
    """
    middle, best = float(np.median(results)), float(np.max(results))
    unit = best - middle
    if unit <= 0:
        yield _standardised(results, np.zeros_like(results))
        return
    below = (middle - results) / unit - depth
    squeezed = middle - unit * (depth + np.log1p(np.maximum(below, 0.0)))
    yield _standardised(np.where(below > 0, squeezed, results), -np.log1p(np.maximum(below, 0.0)))
    gap = (best - results) / unit
    for softness in softnesses:
        warped = -np.log(gap + softness)
        # The slope of -log(g + c) is 1 / (g + c), whose logarithm is the value itself.
        yield _standardised(warped, warped - math.log(unit), _PENALTY * math.log10(softness / 10))


def _standardised(values: FloatArray, log_slopes: FloatArray, log_prior: float = 0.0) -> Scale:
    offset, deviation = float(np.mean(values)), float(np.std(values)) or 1.0
    targets = (values - offset) / deviation
    return Scale(targets, offset, deviation, log_slopes - math.log(deviation), log_prior)


@dataclass(frozen=True)
class ModelOptions:
    """Settings of the Gaussian process; the defaults were chosen by a benchmark."""

    #: The noise's variance; None to estimate it.
    fixed_noise: float | None = None
    starts: int = 2
    #: The most points that the process uses; if there are more, they are thinned out.
    process_points: int = 500
    #: The depth at which `scales` compresses results.
    linear_depth: float = 3.0
    #: Softnesses of the warped scales, which are tried unless the noise is fixed.
    softnesses: tuple[float, ...] = ()


def thin(targets: FloatArray, limit: int) -> NDArray[np.int_]:
    """Return the indices of at most `limit` points: half are the best ones, the others spread over time."""
    if len(targets) <= limit:
        return np.arange(len(targets))
    order = np.argsort(-targets, kind="stable")
    best, others = order[: limit // 2], np.sort(order[limit // 2 :])
    spread = others[np.linspace(0, len(others) - 1, limit - limit // 2).astype(int)]
    return np.sort(np.concatenate([best, spread]))


#: The most points that the fit of the hyperparameters uses; if there are more, they are thinned out.
_FIT_POINTS = 150


class FitState(NamedTuple):
    """The start of a later fit, saved with the search: JSON values."""

    theta: list[float]
    #: The number of the scale that the results were on.
    scale: int
    #: How many results there were when a fit last started from scratch.
    fresh_at: int
    #: A digest of what was fitted.
    data: str
    #: True if wide uniform ranges such as `uniform(1e-5, 1)` have linear axes instead of logarithmic ones.
    linear: bool = False


#: Such axes are linear (`FitState.linear`) if the log posterior density gains more than this.
_LINEAR_LEAD = 1.0
#: Fits to at most this many results start from scratch. The second number is for reports (if `timed`).
_ALWAYS_FRESH, _ALWAYS_FRESH_REPORTS = 60, 40
#: Fits to more do so once the kept results have grown by this factor since the last fit from scratch.
_FRESH_GROWTH = 1.25
#: Steps of a fit that continues an earlier one: to compare the scales, and on the scale that is used.
_WARM_STEPS, _WARM_STEPS_BEST = 2, 6
#: Steps of a fit from scratch: to few results, and to many, where the last digits matter less.
_FRESH_STEPS, _FRESH_STEPS_MANY = 60, 30


class FittedModel:
    """The covariance and scaling fitted to a set of results; points in flight do not change them.

    `powers`, one entry per parameter, are those of `SearchSpace`. `earlier` is the state of an earlier fit,
    which is used as it is if the results are the same. If `timed`, the results are reports, and the last
    feature is their time. `task` is the posterior mean of an earlier experiment.
    """

    def __init__(
        self,
        features: FloatArray,
        targets: FloatArray,
        groups: NDArray[np.int_],
        options: ModelOptions,
        powers: FloatArray | None = None,
        earlier: FitState | None = None,
        timed: bool = False,
        task: Task | None = None,
    ) -> None:
        #: The indices of the results that the model keeps.
        self.kept = thin(targets, options.process_points)
        self.features = features[self.kept]
        self._groups, self._options, self.timed, self._task = groups, options, timed, task
        self._powers = powers if powers is not None and np.any(powers) else None
        softnesses = options.softnesses if options.fixed_noise is None else ()
        candidates = list(scales(targets[self.kept], options.linear_depth, softnesses))
        # Each scale keeps the order, so these are the same points on all scales.
        self._few = thin(candidates[0].targets, _FIT_POINTS)
        self._task_means = None if task is None else task(self.features)[self._few]
        #: Where a later fit starts.
        self.state = self._fit(candidates, earlier)
        chosen = candidates[self.state.scale]
        likelihood = self._likelihood(chosen.targets, self.state.linear)
        self.covariance = self._covariance_of(likelihood.hyperparameters(np.asarray(self.state.theta)))
        self.targets, self.offset, self.scale = chosen.targets, chosen.offset, chosen.deviation

    def _likelihood(self, targets: FloatArray, is_linear: bool) -> MarginalLikelihood:
        features = self.features[self._few]
        if is_linear and self._powers is not None:
            features = linear(features, self._powers[self._groups])
        return MarginalLikelihood(
            features,
            targets[self._few],
            self._groups,
            fixed_noise=self._options.fixed_noise,
            timed=self.timed,
            task=self._task_means,
        )

    def _digest(self, targets: FloatArray) -> str:
        """Return a digest of what is fitted."""
        data = hashlib.sha1(self.features[self._few].tobytes() + targets[self._few].tobytes())
        data.update(repr(self._options).encode())
        if self._task_means is not None:
            data.update(self._task_means.tobytes())
        return data.hexdigest()

    def _fit(self, candidates: list[Scale], earlier: FitState | None) -> FitState:
        """Return the fit on the most probable scale."""
        rows, digest, warm = len(self.features), self._digest(candidates[0].targets), None
        if earlier is not None and earlier.scale < len(candidates):
            theta = np.asarray(earlier.theta)
            if earlier.data == digest:
                return earlier
            always_fresh = _ALWAYS_FRESH_REPORTS if self.timed else _ALWAYS_FRESH
            if always_fresh < rows < _FRESH_GROWTH * earlier.fresh_at and len(theta) == self._groups[-1] + 3:
                warm = theta
        is_linear = earlier is not None and warm is not None and earlier.linear
        likelihoods = [self._likelihood(scale.targets, is_linear) for scale in candidates]
        starts = [warm] if warm is not None else likelihoods[0].starts()
        # One start is enough to compare scales; the others are for the scale that is used.
        steps = _FRESH_STEPS if rows <= _ALWAYS_FRESH else _FRESH_STEPS_MANY
        fits = [fit(each, starts[:1], steps if warm is None else _WARM_STEPS) for each in likelihoods]
        posteriors = [
            height + scale.log_slopes[self._few].sum() + scale.log_prior
            for (_, height), scale in zip(fits, candidates, strict=True)
        ]
        best = int(np.argmax(posteriors))
        theta, height = fits[best]
        if earlier is not None and warm is not None:
            theta, _ = fit(likelihoods[best], [theta], _WARM_STEPS_BEST)
            fresh_at = earlier.fresh_at
        else:
            fresh_at, number = rows, self._options.starts
            if number > 1:
                others = fit(likelihoods[best], starts[1:number], steps)
                theta, height = max(fits[best], others, key=lambda each: each[1])
            if self._powers is not None:
                on_linear = fit(self._likelihood(candidates[best].targets, True), starts[:number], steps)
                is_linear = on_linear[1] > height + _LINEAR_LEAD
                theta = on_linear[0] if is_linear else theta
        return FitState([float(t) for t in theta], best, fresh_at, digest, is_linear)

    def _covariance_of(self, hyperparameters: Hyperparameters) -> MaternCovariance:
        powers = self._powers if self.state.linear else None
        return MaternCovariance(hyperparameters, self._groups, self.timed, powers, self._task)

    def drawn(self, number: int, seed: int) -> list[FittedModel]:
        """Return this model and others with hyperparameters drawn from their posterior, `number` in all."""
        models = [self]
        if number > 1:
            likelihood = self._likelihood(self.targets, self.state.linear)
            generator = np.random.default_rng(seed)
            for drawn in draws(likelihood, np.asarray(self.state.theta), number - 1, generator):
                models.append(copy.copy(self))
                models[-1].covariance = self._covariance_of(likelihood.hyperparameters(drawn))
        return models

    def condition(self) -> Conditioned:
        """Return the process given only the results, its targets standardised."""
        noise = np.full(len(self.features), self.covariance.noise)
        return Conditioned(self.features, self.targets[:, None], noise, self.covariance)
