r"""The covariance function: an ARD Matérn-5/2.

.. math::

    k(x, x') = s\,\big(1 + \sqrt5 r + \tfrac53 r^2\big)e^{-\sqrt5 r},\qquad
    r^2 = \sum_g (x_g - x'_g)^2 / \ell_g^2

(Rasmussen & Williams, 2006, eq. 4.17; one length scale :math:`\ell_g` per parameter.)

An earlier experiment on other data is a prior of unknown weight: with its standardised posterior mean
:math:`m(x)`, the new task is :math:`f(x) = w\,m(x) + d(x)`, where :math:`w \sim N(0, 1)` and :math:`d` is the
process above, so :math:`m(x)\,m(x')` is added to the covariance (section 2.7, with one basis function).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.floating[Any]]
#: Maps features to the posterior mean of an earlier experiment, shape (points,).
Task = Callable[[FloatArray], FloatArray]

SQRT5 = math.sqrt(5.0)


def matern52(squared: FloatArray) -> FloatArray:
    """Return the Matérn-5/2 correlation at squared scaled distances.

    >>> matern52(np.array([0.0, 1.0])).round(4).tolist()
    [1.0, 0.524]
    """
    root = SQRT5 * np.sqrt(squared)
    decay = np.exp(-root)
    # In place: with hundreds of results, new arrays take a quarter longer.
    root += 1.0
    root += (5.0 / 3.0) * squared
    root *= decay
    return root


def squared_distances(left: FloatArray, right: FloatArray) -> FloatArray:
    """Return the squared distances of points, shape (left points, right points), never below 0.

    >>> squared_distances(np.array([[0.0, 0.0]]), np.array([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[25.0, 0.0]]
    """
    squared = (-2.0 * left) @ right.T
    squared += np.square(left).sum(axis=1)[:, None]
    squared += np.square(right).sum(axis=1)
    return np.maximum(squared, 0.0, out=squared)


def with_context(features: FloatArray, context: ArrayLike) -> FloatArray:
    """Return features, shape (points, features), followed by those of `context`, the same for all points."""
    return np.concatenate([features, np.tile(context, (len(features), 1))], axis=1)


@dataclass(frozen=True)
class Hyperparameters:
    """Length scales by parameter, the signal's variance and the noise's, for standardised targets."""

    lengths: FloatArray
    signal: float
    noise: float


def linear(features: FloatArray, powers: FloatArray) -> FloatArray:
    """Return features in [0, 1] on linear axes; those whose entry in `powers` is 0 stay as they are.

    >>> linear(np.array([[0.5, 0.5]]), np.array([0.0, np.log(1e4)])).round(4).tolist()
    [[0.5, 0.0099]]
    """
    growth = np.where(powers > 0, np.expm1(powers), 1.0)
    return np.where(powers > 0, np.expm1(powers * features) / growth, features)


#: Variance and length scale of the trend that all learning curves share, for standardised results.
_TREND_VARIANCE, _TREND_LENGTH = 4.0, 0.5


def trend(left: FloatArray, right: FloatArray) -> FloatArray:
    """Return the covariance of the trend that all learning curves share, at times of shape (points,)."""
    difference = (left[:, None] - right[None, :]) / _TREND_LENGTH
    return _TREND_VARIANCE * np.exp(-0.5 * np.square(difference))


class MaternCovariance:
    """The covariance of the noise-free objective; `groups` has the index of each feature's parameter.

    If `timed`, the last feature is the time of a report, and the `trend` is added: the Matérn kernel then
    models only how a configuration's curve differs from the trend. `powers` has an entry per parameter, see
    `linear`. `task` is the posterior mean of an earlier task.
    """

    def __init__(
        self,
        hyperparameters: Hyperparameters,
        groups: NDArray[np.int_],
        timed: bool = False,
        powers: FloatArray | None = None,
        task: Task | None = None,
    ) -> None:
        self.hyperparameters, self._timed, self._task = hyperparameters, timed, task
        self._powers = None if powers is None else powers[groups]
        self._scale = 1.0 / hyperparameters.lengths[groups]
        self.signal, self.noise = hyperparameters.signal, hyperparameters.noise
        #: The right points of the latest call, prepared: consecutive calls of a climb repeat them.
        self._latest: tuple[FloatArray, FloatArray, FloatArray | None] | None = None

    def _prepared(self, points: FloatArray) -> tuple[FloatArray, FloatArray | None]:
        """Return points on their scaled axes, and the earlier task's mean there."""
        axes = points if self._powers is None else linear(points, self._powers)
        return axes * self._scale, None if self._task is None else self._task(points)

    def between(self, left: FloatArray, right: FloatArray) -> FloatArray:
        """Return the covariance, shape (left points, right points)."""
        if self._latest is None or self._latest[0] is not right:
            self._latest = (right, *self._prepared(right))
        _, scaled, right_task = self._latest
        own, left_task = (scaled, right_task) if left is right else self._prepared(left)
        covariance = matern52(squared_distances(own, scaled))
        covariance *= self.signal
        if self._timed:
            # Reports come at few different times, and all queries at one.
            times, which = np.unique(left[:, -1], return_inverse=True)
            covariance += trend(times, right[:, -1])[which]
        if left_task is not None and right_task is not None:
            covariance += np.outer(left_task, right_task)
        return covariance

    def variance(self, queries: FloatArray) -> FloatArray:
        """Return the prior variance, shape (queries,)."""
        variances = np.full(len(queries), self.signal + (_TREND_VARIANCE if self._timed else 0.0))
        return variances if self._task is None else variances + np.square(self._task(queries))
