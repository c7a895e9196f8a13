"""Where trials fail: a Gaussian process on failed or not, which learns what failures depend on."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from horovod_tune.search.gp.acquisition import log_probability_below
from horovod_tune.search.gp.fit import MarginalLikelihood, Priors, fit
from horovod_tune.search.gp.kernels import FloatArray, Hyperparameters, MaternCovariance
from horovod_tune.search.gp.process import Conditioned

#: Losses of such a size have no differences that a float can hold, and count as failed in any case.
_NO_NUMBER = 1e307
#: A jump to unusable results: this many times the range, and the size, of all better ones.
_JUMP = 100.0
#: At least so many results, and this share of them, come before the jump.
_FEWEST_GOOD, _SHARE_GOOD = 4, 0.25


def diverged(losses: FloatArray) -> NDArray[np.bool_]:
    """Return which losses (smaller is better) are so far beyond the others that their size is meaningless.

    A training that diverges reports 1e6 or 1e30 where others report 0.3. Sorted, such losses come after a
    jump that is a hundred times as wide as the range of the losses before it, to a hundred times their
    size; what comes after the first such jump counts as failed. Losses that grow without a gap are left
    alone.

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


#: A place is safe where the modelled label (0 for a result, 1 for a failure) is below the first with enough
#: probability; the second keeps the edge soft.
_TOLERATED, _BLUR = 0.3, 0.05
#: Variances of the label and of its noise. The label's deviation is its unit where length scales are learned.
_SIGNAL, _NOISE = 0.25, 0.01
#: Length scales begin at the first times the square root of the number of parameters; their logarithms have a
#: normal prior of the second as deviation. Only they are learned. They shrink to no less than the third times
#: that: a wall that is steep between two trials would make everything behind it unknown.
_LENGTH, _LENGTH_STD, _LEAST_LENGTH = 0.5, 0.7, 0.7
#: So many results and as many failures, evenly over time, are learned from: a suggestion has little time.
_LEARNED_FROM, _STEPS = 50, 30
#: The probability counts to this power: a failed trial costs more than its place in the budget.
_CAUTION = 3.0


class FailureModel:
    """The probability that a trial does not fail.

    `scored` and `failed` have the shape (points, features), `groups` names the parameter of each feature.
    """

    def __init__(self, scored: FloatArray, failed: FloatArray, groups: NDArray[np.int_]) -> None:
        features = np.concatenate([scored, failed])
        labels = np.concatenate([np.zeros(len(scored)), np.ones(len(failed))])
        lengths = _lengths(_spread(scored), _spread(failed), groups)
        covariance = MaternCovariance(Hyperparameters(lengths, _SIGNAL, _NOISE), groups)
        noise = np.full(len(labels), covariance.noise)
        self._process = Conditioned(features, labels[:, None], noise, covariance, mean=float(labels.mean()))

    def __call__(self, features: FloatArray) -> FloatArray:
        """Return the logarithm of the probability of not failing, shape (queries,)."""
        means, stds = self._process.predict(features)
        return _CAUTION * log_probability_below(_TOLERATED, means[:, 0], np.sqrt(stds**2 + _BLUR**2))


def _spread(points: FloatArray) -> FloatArray:
    """Return at most `_LEARNED_FROM` of the points, evenly over time."""
    number = min(len(points), _LEARNED_FROM)
    return points[np.linspace(0, len(points) - 1, number).round().astype(int)]


def _lengths(scored: FloatArray, failed: FloatArray, groups: NDArray[np.int_]) -> FloatArray:
    """Return the MAP length scales of the label, shape (parameters,)."""
    count = int(groups.max()) + 1 if len(groups) else 0
    usual = math.log(_LENGTH) + 0.5 * math.log(max(1, count))
    if not len(scored) or not len(failed) or not count:
        return np.full(count, math.exp(usual))
    unit = math.sqrt(_SIGNAL)
    labels = np.concatenate([np.zeros(len(scored)), np.ones(len(failed))])
    noise = _NOISE / _SIGNAL
    likelihood = MarginalLikelihood(
        np.concatenate([scored, failed]),
        (labels - labels.mean()) / unit,
        groups,
        # The signal is kept.
        Priors(length_mean=math.log(_LENGTH), length_std=_LENGTH_STD, signal_std=1e-3),
        fixed_noise=noise,
    )
    found = fit(likelihood, [np.append(np.full(count, usual), [0.0, math.log(noise)])], _STEPS)
    return np.maximum(found.hyperparameters.lengths, _LEAST_LENGTH * math.exp(usual))
