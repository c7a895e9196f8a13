"""A Gaussian process given observations: means, deviations, joint covariances and slopes at other points."""

from __future__ import annotations

import math

import numpy as np
from scipy.linalg import cho_solve, cholesky, solve_triangular
from scipy.linalg.lapack import dtrtri

from horovod_tune.search.gp.fit import JITTER
from horovod_tune.search.gp.kernels import Covariance, FloatArray


class Conditioned:
    """The process given observations; several columns of targets share one set of points.

    `targets` has the shape (points, draws), `noise` (points,). Means have the shape (queries, draws) and
    standard deviations, which do not depend on the targets, (queries,).
    """

    def __init__(
        self,
        features: FloatArray,
        targets: FloatArray,
        noise: FloatArray,
        covariance: Covariance,
        mean: float | None = None,
    ) -> None:
        self._points, self._covariance = features, covariance
        self._least = 1e-12 * covariance.signal
        matrix = covariance.between(features, features)
        matrix[np.diag_indices(len(features))] += noise + JITTER * covariance.signal
        self._factor = cholesky(matrix, lower=True, check_finite=False)
        if mean is None:
            sums = cho_solve((self._factor, True), np.ones(len(features)), check_finite=False)
            mean = float(np.mean(sums @ targets) / sums.sum())
        self.mean = mean
        self._solved = cho_solve((self._factor, True), targets - mean, check_finite=False)
        #: The inverse of the factor, made where a climb asks for slopes at many points one by one.
        self._inverse: FloatArray | None = None

    def predict(self, queries: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return means, shape (queries, draws), and noise-free standard deviations, shape (queries,)."""
        cross = self._covariance.between(queries, self._points)
        if self._inverse is not None:
            half = self._inverse @ cross.T
        else:
            half = solve_triangular(self._factor, cross.T, lower=True, check_finite=False)
        variance = self._covariance.variance(queries) - np.square(half).sum(0)
        return self.mean + cross @ self._solved, np.sqrt(np.maximum(variance, self._least))

    def predict_joint(self, queries: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return means, shape (queries, draws), and the noise-free covariance, shape (queries, queries)."""
        cross = self._covariance.between(queries, self._points)
        half = solve_triangular(self._factor, cross.T, lower=True, check_finite=False)
        return self.mean + cross @ self._solved, self._covariance.between(queries, queries) - half.T @ half

    def predict_with_slopes(self, query: FloatArray) -> tuple[FloatArray, float, FloatArray, FloatArray]:
        """Return mean (draws,), standard deviation, and their slopes (features, draws) and (features,)."""
        cross, jacobian, prior, prior_slope = self._covariance.slopes(query, self._points)
        if self._inverse is None:
            self._inverse = dtrtri(self._factor, lower=1)[0]
        half = self._inverse @ cross
        backwards = self._inverse.T @ half
        std = math.sqrt(max(prior - float(half @ half), self._least))
        return (
            self.mean + cross @ self._solved,
            std,
            jacobian.T @ self._solved,
            (0.5 * prior_slope - jacobian.T @ backwards) / std,
        )


class EarlierTask:
    """An earlier experiment on other data: the mean of its process, over the parameters only.

    ``context`` are features that its queries share after the parameters': the time at which its learning
    curves are looked at.
    """

    def __init__(self, process: Conditioned, parameters: int, context: FloatArray) -> None:
        self._process, self._parameters, self._context = process, parameters, context

    def __call__(self, features: FloatArray) -> FloatArray:
        """Return the mean, shape (points,), at `features`, whose further columns are left out."""
        own = features[:, : self._parameters]
        if len(self._context):
            own = np.concatenate([own, np.tile(self._context, (len(own), 1))], axis=1)
        return self._process.predict(own)[0][:, 0] - self._process.mean

    def with_slope(self, query: FloatArray) -> tuple[float, FloatArray]:
        """Return the mean at one query, shape (features,), and its slopes by them."""
        here = np.concatenate([query[: self._parameters], self._context])
        means, _, slopes, _ = self._process.predict_with_slopes(here)
        padded = np.zeros(len(query))
        padded[: self._parameters] = slopes[: self._parameters, 0]
        return float(means[0]) - self._process.mean, padded


class TransferCovariance:
    r"""An earlier experiment as a prior: its shape, with a weight that the new results decide.

    With :math:`m(x)` what the earlier results are believed to be, on their own standardised scale, the new
    task is

    .. math:: f(x) = w\,m(x) + d(x),\qquad w \sim N(0, 1)

    with a Gaussian process :math:`d` of its own: a linear kernel on :math:`m` added to the usual one
    (Rasmussen & Williams, 2006, section 2.7). If the tasks are not related, :math:`w` shrinks to 0.
    """

    def __init__(self, own: Covariance, task: EarlierTask) -> None:
        self._own, self._task = own, task
        self.noise, self.signal = own.noise, own.signal
        #: The points of the latest call and the task there: a climb asks for the same ones every time.
        self._latest: tuple[FloatArray, FloatArray] | None = None

    def _at(self, points: FloatArray) -> FloatArray:
        if self._latest is None or self._latest[0] is not points:
            self._latest = (points, self._task(points))
        return self._latest[1]

    def between(self, left: FloatArray, right: FloatArray) -> FloatArray:
        there = self._at(right)
        here = there if left is right else self._task(left)
        return self._own.between(left, right) + np.outer(here, there)

    def variance(self, queries: FloatArray) -> FloatArray:
        return self._own.variance(queries) + np.square(self._task(queries))

    def slopes(
        self, query: FloatArray, points: FloatArray
    ) -> tuple[FloatArray, FloatArray, float, FloatArray]:
        found, jacobian, prior, prior_slope = self._own.slopes(query, points)
        here, slope = self._task.with_slope(query)
        there = self._at(points)
        return (
            found + here * there,
            jacobian + there[:, None] * slope,
            prior + here * here,
            prior_slope + 2.0 * here * slope,
        )
