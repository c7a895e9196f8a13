"""Feasibility of a point, whatever its objective: the probability that it fails or breaks a limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from scipy.special import log_ndtr

from horovod_tune.search.gp.fitted_model import FittedModel
from horovod_tune.search.gp.kernels import FloatArray

#: The logarithm of a probability at features, shape (queries, features): shape (queries,).
Feasibility = Callable[[FloatArray], FloatArray]


class JointFeasibility:
    """The joint probability of independent conditions; an acquisition until a result keeps the limits.

    `rows` are the results that it knows.
    """

    def __init__(self, feasibilities: Sequence[Feasibility], rows: int) -> None:
        self._feasibilities, self.rows = tuple(feasibilities), rows

    def __call__(self, features: FloatArray) -> FloatArray:
        return np.sum([each(features) for each in self._feasibilities], axis=0)


class LimitFeasibility:
    """The probability that a limit is kept (Gardner et al., 2014).

    `model` is one of the remaining `slack`, so that the limit is at 0.
    """

    def __init__(self, model: FittedModel) -> None:
        self._process = model.condition()
        self._bound = -model.offset / model.scale

    def __call__(self, features: FloatArray) -> FloatArray:
        means, stds = self._process.predict(features)
        return log_ndtr((means[:, 0] - self._bound) / stds)


def slack(values: FloatArray, bound: float, upwards: bool) -> FloatArray:
    """Return how far inside a limit values are, shape (points,), on a scale that large ones do not stretch.

    0 is at the bound, and 1 near the median distance from it; from some times that on it grows like a
    logarithm. `upwards` for a limit from below.

    >>> slack(np.array([10.0, 20.0, 30.0, 1e6]), 20.0, upwards=False).round(2).tolist()
    [0.88, 0.0, -0.88, -12.21]
    """
    distances = values - bound if upwards else bound - values
    unit = float(np.median(np.abs(distances))) or float(np.abs(distances).max()) or 1.0
    return np.arcsinh(distances / unit)
