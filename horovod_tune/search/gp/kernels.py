r"""The covariance function: an ARD Matérn-5/2.

.. math::

    k(x, x') = s\,\big(1 + \sqrt5 r + \tfrac53 r^2\big)e^{-\sqrt5 r},\qquad
    r^2 = \sum_g (x_g - x'_g)^2 / \ell_g^2

(Rasmussen & Williams, 2006, eq. 4.17; one length scale :math:`\ell_g` per parameter.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.floating[Any]]

SQRT5 = math.sqrt(5.0)


def matern52(squared: FloatArray) -> FloatArray:
    """Return the Matérn-5/2 correlation at squared scaled distances.

    >>> matern52(np.array([0.0, 1.0])).round(4).tolist()
    [1.0, 0.524]
    """
    root = SQRT5 * np.sqrt(squared)
    decay = np.exp(-root)
    root += 1.0
    root += (5.0 / 3.0) * squared
    root *= decay
    return root


def matern52_slope(squared: FloatArray) -> FloatArray:
    """Return the derivative of `matern52` by its argument; finite at 0."""
    root = SQRT5 * np.sqrt(squared)
    return -(5.0 / 6.0) * (1.0 + root) * np.exp(-root)


def squared_distances(left: FloatArray, right: FloatArray) -> FloatArray:
    """Return the squared distances of points, shape (left points, right points), never below 0.

    >>> squared_distances(np.array([[0.0, 0.0]]), np.array([[3.0, 4.0], [0.0, 0.0]])).tolist()
    [[25.0, 0.0]]
    """
    squared = (-2.0 * left) @ right.T
    squared += np.square(left).sum(axis=1)[:, None]
    squared += np.square(right).sum(axis=1)[None, :]
    return np.maximum(squared, 0.0, out=squared)


class Covariance(Protocol):
    """The covariance of the noise-free objective, and what the results' noise adds to it."""

    @property
    def noise(self) -> float:
        """The variance of the noise, for standardised targets."""

    @property
    def signal(self) -> float:
        """A typical prior variance, to which numerical thresholds are relative."""

    def between(self, left: FloatArray, right: FloatArray) -> FloatArray:
        """Return the covariance, shape (left points, right points)."""

    def variance(self, queries: FloatArray) -> FloatArray:
        """Return the prior variance, shape (queries,)."""

    def slopes(
        self, query: FloatArray, points: FloatArray
    ) -> tuple[FloatArray, FloatArray, float, FloatArray]:
        """Return, for one query of shape (features,), its covariance with the points, shape (points,), that
        covariance's slopes by the query, shape (points, features), its prior variance, and its slope.
        """


@dataclass(frozen=True)
class Hyperparameters:
    """Length scales by parameter, the signal's variance and the noise's, for standardised targets."""

    lengths: FloatArray
    signal: float
    noise: float


def linear(features: FloatArray, powers: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return features in [0, 1] on linear axes, and the slopes by them.

    Those whose entry in `powers`, shape (features,), is 0 stay as they are.

    >>> linear(np.array([[0.5, 0.5]]), np.array([0.0, np.log(1e4)]))[0].round(4).tolist()
    [[0.5, 0.0099]]
    """
    growth = np.where(powers > 0, np.expm1(powers), 1.0)
    stretched = np.where(powers > 0, np.expm1(powers * features) / growth, features)
    return stretched, np.where(powers > 0, powers * np.exp(powers * features) / growth, 1.0)


#: Variance and length scale of the course that all learning curves share, for standardised results.
_TREND_VARIANCE, _TREND_LENGTH = 4.0, 0.5


def trend(left: FloatArray, right: FloatArray) -> FloatArray:
    """Return the covariance of the course that all learning curves share, at times of shape (points,)."""
    difference = (left[:, None] - right[None, :]) / _TREND_LENGTH
    return _TREND_VARIANCE * np.exp(-0.5 * np.square(difference))


class MaternCovariance:
    """The module's formula; `groups` names the parameter that each feature belongs to.

    Where `timed`, the last feature is the time of a report, and the `trend` is added: then what is learned
    about one configuration from its curve is how it differs from the others'. With `powers`, one entry a
    parameter, the axes that have one are `linear`.
    """

    def __init__(
        self,
        hyperparameters: Hyperparameters,
        groups: NDArray[np.int_],
        timed: bool = False,
        powers: FloatArray | None = None,
    ) -> None:
        self._timed = timed
        self._powers = None if powers is None else powers[groups]
        self.hyperparameters = hyperparameters
        self._scale = 1.0 / hyperparameters.lengths[groups] if len(groups) else np.empty(0)
        self.signal, self.noise = hyperparameters.signal, hyperparameters.noise
        #: The points of the latest call, and the same on their scaled axes: a climb repeats them.
        self._latest: tuple[FloatArray, FloatArray] | None = None

    def _scaled_points(self, points: FloatArray) -> FloatArray:
        if self._latest is None or self._latest[0] is not points:
            self._latest = (points, self._scaled(points))
        return self._latest[1]

    def _scaled(self, features: FloatArray) -> FloatArray:
        if self._powers is not None:
            features = linear(features, self._powers)[0]
        return features * self._scale

    def between(self, left: FloatArray, right: FloatArray) -> FloatArray:
        found = matern52(squared_distances(self._scaled(left), self._scaled_points(right)))
        found *= self.signal
        if self._timed:
            # Reports come at few different times, and all queries at one.
            times, which = np.unique(left[:, -1], return_inverse=True)
            found += trend(times, right[:, -1])[which]
        return found

    def variance(self, queries: FloatArray) -> FloatArray:
        return np.full(len(queries), self._prior)

    @property
    def _prior(self) -> float:
        return self.signal + (_TREND_VARIANCE if self._timed else 0.0)

    def slopes(
        self, query: FloatArray, points: FloatArray
    ) -> tuple[FloatArray, FloatArray, float, FloatArray]:
        difference = self._scaled(query) - self._scaled_points(points)
        squared = np.square(difference).sum(1)
        stretch = self._scale
        if self._powers is not None:
            stretch = stretch * linear(query, self._powers)[1]
        jacobian = (2.0 * self.signal * matern52_slope(squared))[:, None] * difference * stretch
        found = self.signal * matern52(squared)
        if self._timed:
            # Queries are climbed at one time, so the slope by the time is never used.
            found = found + trend(query[-1:], points[:, -1])[0]
        return found, jacobian, self._prior, np.zeros(len(query))
