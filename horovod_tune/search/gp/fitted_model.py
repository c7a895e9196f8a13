"""The Gaussian process fitted to a set of results: the scale that they are on, and its hyperparameters."""

from __future__ import annotations

import copy
import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from horovod_tune.search.gp import fit as gp_fit
from horovod_tune.search.gp.axes import Axes
from horovod_tune.search.gp.earlier_task import EarlierTask, TransferCovariance
from horovod_tune.search.gp.fit import Fit, MarginalLikelihood, Priors
from horovod_tune.search.gp.hyperparameter_draws import draws
from horovod_tune.search.gp.kernels import (
    Covariance,
    FloatArray,
    Hyperparameters,
    MaternCovariance,
    linear,
)
from horovod_tune.search.gp.output_scales import Scale, scales
from horovod_tune.search.gp.process import Conditioned


@dataclass(frozen=True)
class ModelOptions:
    """How the Gaussian process is built; the defaults are what the benchmark chose."""

    #: The noise's variance; None to estimate it.
    fixed_noise: float | None = None
    starts: int = 2
    #: More points than this are thinned out for the process.
    process_points: int = 500
    #: How far below the median, in units of median to best, targets are taken as they are.
    linear_depth: float = 3.0
    #: The warped scales that are tried besides the results' own, see `warping`; not for acquisition functions
    #: that have a number on the objective's scale. `fixed_noise` has one too: none are tried.
    softnesses: tuple[float, ...] = ()


def thin(targets: FloatArray, limit: int) -> NDArray[np.int_]:
    """Return the indices of at most `limit` points: the best half, and the rest spread over time."""
    if len(targets) <= limit:
        return np.arange(len(targets))
    order = np.argsort(-targets, kind="stable")
    best, others = order[: limit // 2], np.sort(order[limit // 2 :])
    spread = others[np.linspace(0, len(others) - 1, limit - limit // 2).astype(int)]
    return np.sort(np.concatenate([best, spread]))


#: More points than this are thinned out for the fit of the hyperparameters.
_FIT_POINTS = 150


class FitState(NamedTuple):
    """What a later fit starts from, and a saved search keeps: JSON values."""

    theta: list[float]
    #: The number of the scale that the results were on.
    scale: int
    #: How many results there were when a fit last started from scratch.
    fresh_at: int
    #: A digest of what was fitted.
    data: str
    #: True if the axes over powers of ten are linear.
    linear: bool = False


#: What the logarithm of the posterior density must gain for axes to be warped, and for those over powers of
#: ten to be linear.
_WARP_LEAD, _LINEAR_LEAD = 5.0, 1.0
#: To so few results a fit always starts from scratch; reports of curves come several for each decision.
_ALWAYS_FRESH, _ALWAYS_FRESH_REPORTS = 60, 40
#: Otherwise it does when there are this many times the results of the last one that did.
_FRESH_GROWTH = 1.25
#: Steps of a fit that continues an earlier one: to compare the scales, and on the scale that is used.
_WARM_STEPS, _WARM_STEPS_BEST = 2, 6
#: Steps of a fit from scratch, to few results, and to more, which has less to gain from the last digits.
_FRESH_STEPS, _FRESH_STEPS_MANY = 60, 30


class FittedModel:
    """The covariance and scaling that a set of results gives; points in flight do not change them.

    `earlier` is the state of a fit to fewer results. If it has the same results, nothing is fitted. If
    `timed`, the results are reports, and the last feature is their time. `task` is an earlier experiment's
    model of this task.
    """

    def __init__(
        self,
        features: FloatArray,
        targets: FloatArray,
        groups: NDArray[np.int_],
        options: ModelOptions,
        axes: Axes | None = None,
        earlier: FitState | None = None,
        timed: bool = False,
        task: EarlierTask | None = None,
    ) -> None:
        self._axes, self._timed = axes, timed
        self._warpable = None if axes is None else axes.warpable
        self.state: FitState | None = None
        kept = thin(targets, options.process_points)
        self.features, self.groups, self.options = features[kept], groups, options
        #: Which of the results that were given these are.
        self.kept = kept
        self._transfer = task
        #: Hyperparameters without warps: the length scales, the signal and the noise.
        self._without_warps = (int(groups.max()) + 1 if len(groups) else 0) + 2
        self._task = None if task is None else task(self.features)
        softnesses = options.softnesses if options.fixed_noise is None else ()
        found = list(scales(targets[kept], options.linear_depth, softnesses))
        # Each scale keeps the order, so these are the same points on all.
        few = thin(found[0].targets, _FIT_POINTS)
        number, fitted = self._fit(found, few, earlier)
        chosen = found[number]
        self.covariance = self._covariance_of(fitted, task)
        self.targets, self.offset, self.scale = chosen.targets, chosen.offset, chosen.deviation

    def _fit(
        self, found: list[Scale], few: NDArray[np.int_], earlier: FitState | None
    ) -> tuple[int, Hyperparameters]:
        """Return the number of the most probable scale and the hyperparameters on it."""
        options, features, rows = self.options, self.features[few], len(self.features)
        priors, noise = Priors(), options.fixed_noise
        data = hashlib.sha1(features.tobytes() + found[0].targets[few].tobytes() + repr(options).encode())
        task = None if self._task is None else self._task[few]
        if task is not None:
            data.update(task.tobytes())
        digest = data.hexdigest()

        as_linear = features
        if self._axes is not None and self._axes.spans_powers:
            as_linear = linear(features, self._axes.powers[self.groups])[0]

        def fit(
            scale: Scale, starts: range, warm: FloatArray | None = None, steps: int = 60, warped: bool = False
        ) -> Fit:
            warpable = self._warpable if warped else None
            targets = scale.targets[few]
            groups, timed, places = self.groups, self._timed, as_linear if is_linear else features
            return gp_fit.fit(
                places,
                targets,
                groups,
                priors,
                noise,
                starts,
                warpable,
                warm,
                steps,
                timed,
                task,
            )

        warps = 0 if self._warpable is None else int(self._warpable.sum())
        warm, warped, is_linear, fresh_at = None, False, False, rows
        always_fresh = _ALWAYS_FRESH_REPORTS if self._timed else _ALWAYS_FRESH
        if earlier is not None and earlier.scale < len(found):
            theta = np.asarray(earlier.theta)
            warped, is_linear = len(theta) > self._without_warps, earlier.linear
            if len(theta) == self._without_warps + warped * warps:
                grown = rows >= _FRESH_GROWTH * earlier.fresh_at
                if earlier.data == digest:
                    self.state = earlier
                    warpable = self._warpable if warped else None
                    targets = found[earlier.scale].targets[few]
                    objective = MarginalLikelihood(features, targets, self.groups, priors, noise, warpable)
                    return earlier.scale, objective.hyperparameters(theta)
                if rows > always_fresh and not grown:
                    warm, fresh_at = theta, earlier.fresh_at
        is_linear = is_linear and warm is not None
        # One start is enough to compare scales; the others are for the scale that is used.
        steps = _FRESH_STEPS if rows <= _ALWAYS_FRESH else _FRESH_STEPS_MANY
        warped = warped and warm is not None
        fits = [fit(scale, range(1), warm, steps if warm is None else _WARM_STEPS, warped) for scale in found]
        posteriors = [
            fitted.log_posterior + scale.log_slopes[few].sum() + scale.log_prior
            for fitted, scale in zip(fits, found, strict=True)
        ]
        best = int(np.argmax(posteriors))
        fitted = fits[best]
        if warm is not None:
            fitted = fit(found[best], range(1), fitted.theta, _WARM_STEPS_BEST, warped)
        else:
            if options.starts > 1:
                others = fit(found[best], range(1, options.starts), None, steps)
                fitted = max(fitted, others, key=lambda f: f.log_posterior)
            if as_linear is not features:
                is_linear = True
                on_linear = fit(found[best], range(options.starts), None, steps)
                is_linear = on_linear.log_posterior > fitted.log_posterior + _LINEAR_LEAD
                fitted = on_linear if is_linear else fitted
            if warps:
                start = np.concatenate([fitted.theta, np.zeros(warps)])
                on_warped = fit(found[best], range(1), start, steps, warped=True)
                if on_warped.log_posterior > fitted.log_posterior + _WARP_LEAD:
                    fitted = on_warped
        self.state = FitState([float(t) for t in fitted.theta], best, fresh_at, digest, is_linear)
        return best, fitted.hyperparameters

    def _covariance_of(self, hyperparameters: Hyperparameters, task: EarlierTask | None) -> Covariance:
        assert self.state is not None
        powers = self._axes.powers if self._axes is not None and self.state.linear else None
        own = MaternCovariance(hyperparameters, self.groups, self._timed, powers)
        return own if task is None else TransferCovariance(own, task)

    def drawn(self, number: int, seed: int) -> list[FittedModel]:
        """Return models of the same results: this one, and others whose hyperparameters are drawn from
        their posterior, `number` in all.
        """
        assert self.state is not None
        if number < 2:
            return [self]
        few = thin(self.targets, _FIT_POINTS)
        features, theta = self.features[few], np.asarray(self.state.theta)
        if self.state.linear and self._axes is not None:
            features = linear(features, self._axes.powers[self.groups])[0]
        likelihood = MarginalLikelihood(
            features,
            self.targets[few],
            self.groups,
            Priors(),
            self.options.fixed_noise,
            self._warpable if len(theta) > self._without_warps else None,
            self._timed,
            None if self._task is None else self._task[few],
        )
        found = [self]
        for drawn in draws(likelihood, theta, number - 1, np.random.default_rng(seed)):
            other = copy.copy(self)
            other.covariance = self._covariance_of(likelihood.hyperparameters(drawn), self._transfer)
            found.append(other)
        return found

    def condition(self) -> Conditioned:
        """Return the process given only the results, its targets standardised."""
        noise = np.full(len(self.features), self.covariance.noise)
        return Conditioned(self.features, self.targets[:, None], noise, self.covariance)
