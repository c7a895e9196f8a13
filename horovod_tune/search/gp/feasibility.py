"""Feasibility of a point: the probability that its trial neither fails nor breaks a limit.

A Gaussian process on the label "failed or not" models where trials fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

from horovod_tune.search.gp.fit import Conditioned, MarginalLikelihood, fit
from horovod_tune.search.gp.fitted_model import FittedModel
from horovod_tune.search.gp.kernels import FloatArray, Hyperparameters, MaternCovariance

#: The logarithm of a probability at features, shape (queries, features): shape (queries,).
Feasibility = Callable[[FloatArray], FloatArray]


def joint(feasibilities: Sequence[Feasibility]) -> Feasibility:
    """Return the joint probability of independent conditions."""
    return lambda features: sum((each(features) for each in feasibilities), np.zeros(len(features)))


def of_limit(model: FittedModel) -> Feasibility:
    """Return the probability that a limit is kept (Gardner et al., 2014), from a model of the `slack`."""
    process, bound = model.condition(), -model.offset / model.scale

    def log_kept(features: FloatArray) -> FloatArray:
        means, stds = process.predict(features)
        return log_ndtr((means[:, 0] - bound) / stds)

    return log_kept


def slack(values: FloatArray, bound: float, upwards: bool) -> FloatArray:
    """Return how far inside a limit values are, shape (points,), on a scale that compresses outliers.

    It is 0 at the bound and 0.88 at the median distance from it; far beyond that it grows logarithmically.
    `upwards` is for a lower bound.

    >>> slack(np.array([10.0, 20.0, 30.0, 1e6]), 20.0, upwards=False).round(2).tolist()
    [0.88, 0.0, -0.88, -12.21]
    """
    distances = values - bound if upwards else bound - values
    unit = float(np.median(np.abs(distances))) or float(np.abs(distances).max()) or 1.0
    return np.arcsinh(distances / unit)


#: Differences of losses beyond this overflow a float, so they count as failed in any case.
_NO_NUMBER = 1e307
#: A jump to unusable results: this many times the range, and the size, of all better ones.
_JUMP = 100.0
#: At least this many results, and this share of all, must come before the jump.
_FEWEST_GOOD, _SHARE_GOOD = 4, 0.25


def diverged(losses: FloatArray) -> NDArray[np.bool_]:
    """Return which losses (smaller is better) are so far beyond the others that their size is meaningless.

    In sorted losses, both the range and the largest absolute value grow more than a hundredfold at a jump.
    All losses after the first jump count as failed; losses that grow without a gap do not.

    >>> diverged(np.array([0.3, 1e6, 0.4, 2.3, 0.9, 3e6])).tolist()
    [False, True, False, False, False, True]
    >>> bool(diverged(np.array([1.0, 10.0, 50.0, 400.0, 3000.0, 9000.0])).any())
    False
    """
    endless = np.abs(losses) > _NO_NUMBER
    if endless.any():
        endless[~endless] = diverged(losses[~endless])
        return endless
    order = np.sort(losses)
    fewest = max(_FEWEST_GOOD, int(np.ceil(_SHARE_GOOD * len(order))))
    for last in range(fewest - 1, len(order) - 1):
        width, size = order[last] - order[0], np.abs(order[: last + 1]).max()
        if width > 0 and order[last + 1] - order[0] > _JUMP * width and abs(order[last + 1]) > _JUMP * size:
            return losses > order[last]
    return np.zeros(len(losses), dtype=bool)


#: A point's safety is the probability that its modelled label (0 for a result, 1 for a failure) is below the
#: first value; the second softens that threshold.
_TOLERATED, _BLUR = 0.3, 0.05
#: Variances of the label and of its noise. Length scales are learned from labels divided by the first's root.
_SIGNAL, _NOISE = 0.25, 0.01
#: Only length scales are learned. They start at the first value times the square root of the number of
#: parameters; the second is the standard deviation of their logarithms' prior. Their minimum is the third
#: times their start: if the label rose too steeply, all points beyond a failure would be unknown.
_LENGTH, _LENGTH_STD, _LEAST_LENGTH = 0.5, 0.7, 0.7
#: At most this many results and as many failures, spread evenly over time, are fitted, in at most this many
#: steps: a suggestion has little time.
_LEARNED_FROM, _STEPS = 50, 30
#: The probability is raised to this power: a failed trial costs more than its place in the budget.
_CAUTION = 3.0


class FailureModel:
    """The probability that a trial does not fail.

    `scored` and `failed` have the shape (points, features), `groups` the index of each feature's parameter.
    """

    def __init__(self, scored: FloatArray, failed: FloatArray, groups: NDArray[np.int_]) -> None:
        features, labels = _labelled(scored, failed)
        covariance = MaternCovariance(
            Hyperparameters(_lengths(scored, failed, groups), _SIGNAL, _NOISE), groups
        )
        noise = np.full(len(labels), _NOISE)
        self._process = Conditioned(features, labels[:, None], noise, covariance, mean=float(labels.mean()))

    def __call__(self, features: FloatArray) -> FloatArray:
        """Return the logarithm of the probability of not failing, times `_CAUTION`, shape (queries,)."""
        means, stds = self._process.predict(features)
        return _CAUTION * log_ndtr((_TOLERATED - means[:, 0]) / np.sqrt(stds**2 + _BLUR**2))


def _labelled(scored: FloatArray, failed: FloatArray) -> tuple[FloatArray, FloatArray]:
    return np.concatenate([scored, failed]), np.repeat([0.0, 1.0], [len(scored), len(failed)])


def _spread(points: FloatArray) -> FloatArray:
    """Return at most `_LEARNED_FROM` of the points, evenly over time."""
    number = min(len(points), _LEARNED_FROM)
    return points[np.linspace(0, len(points) - 1, number).round().astype(int)]


def _lengths(scored: FloatArray, failed: FloatArray, groups: NDArray[np.int_]) -> FloatArray:
    """Return the MAP length scales of the label, shape (parameters,)."""
    count = int(groups.max()) + 1
    usual = math.log(_LENGTH) + 0.5 * math.log(count)
    if not len(scored):
        return np.full(count, math.exp(usual))
    features, labels = _labelled(_spread(scored), _spread(failed))
    noise = _NOISE / _SIGNAL
    likelihood = MarginalLikelihood(
        features,
        (labels - labels.mean()) / math.sqrt(_SIGNAL),
        groups,
        fixed_noise=noise,
        lengths=(math.log(_LENGTH), _LENGTH_STD),
        signal_std=1e-3,  # fixes the signal
    )
    theta, _ = fit(likelihood, [np.append(np.full(count, usual), [0.0, math.log(noise)])], _STEPS)
    return np.maximum(likelihood.hyperparameters(theta).lengths, _LEAST_LENGTH * math.exp(usual))
