"""Feasibility of a point, whatever its objective: the probability that it fails or breaks a limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from scipy.special import log_ndtr

from horovod_tune.search.gp.acquisition import log_ndtr_slope
from horovod_tune.search.gp.fitted_model import FittedModel
from horovod_tune.search.gp.kernels import FloatArray


class Feasibility(Protocol):
    """The logarithm of a probability over the model's features."""

    def log_probability(self, features: FloatArray) -> FloatArray:
        """Return it at `features`, shape (queries, features): shape (queries,)."""

    def with_slope(self, query: FloatArray) -> tuple[float, FloatArray]:
        """Return it at one query, and its gradient, shape (features,)."""


class JointFeasibility:
    """The joint probability of independent conditions."""

    def __init__(self, feasibilities: Sequence[Feasibility]) -> None:
        self._feasibilities = tuple(feasibilities)

    def log_probability(self, features: FloatArray) -> FloatArray:
        total = np.zeros(len(features))
        for feasibility in self._feasibilities:
            total += feasibility.log_probability(features)
        return total

    def with_slope(self, query: FloatArray) -> tuple[float, FloatArray]:
        each = [feasibility.with_slope(query) for feasibility in self._feasibilities]
        return sum(value for value, _ in each), np.sum([slope for _, slope in each], axis=0)


class LimitFeasibility:
    """The probability that a limit is kept (Gardner et al., 2014).

    `model` is one of the remaining `slack`, so that the limit is at 0.
    """

    def __init__(self, model: FittedModel) -> None:
        self._process = model.condition()
        self._bound = -model.offset / model.scale

    def log_probability(self, features: FloatArray) -> FloatArray:
        means, stds = self._process.predict(features)
        return log_ndtr((means[:, 0] - self._bound) / stds)

    def with_slope(self, query: FloatArray) -> tuple[float, FloatArray]:
        means, std, mean_slopes, std_slope = self._process.predict_with_slopes(query)
        z = float(means[0] - self._bound) / std
        ratio = float(log_ndtr_slope(np.asarray(z)))
        return float(log_ndtr(z)), ratio * (mean_slopes[:, 0] - z * std_slope) / std


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


class FeasibilityOnly:
    """The acquisition until a result keeps the limits: the point that most probably keeps them."""

    def __init__(self, feasibility: Feasibility, rows: int) -> None:
        self._feasibility, self.rows = feasibility, rows

    def __call__(self, features: FloatArray) -> FloatArray:
        return self._feasibility.log_probability(features)

    def with_slope(self, query: FloatArray) -> tuple[float, FloatArray]:
        return self._feasibility.with_slope(query)
