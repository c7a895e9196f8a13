"""A Gaussian process given observations: means, deviations and joint covariances at other points."""

from __future__ import annotations

import numpy as np
from scipy.linalg import cho_solve, cholesky, solve_triangular

from horovod_tune.search.gp.fit import JITTER
from horovod_tune.search.gp.kernels import FloatArray, MaternCovariance


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
        covariance: MaternCovariance,
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

    def predict(self, queries: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return means, shape (queries, draws), and noise-free standard deviations, shape (queries,)."""
        cross = self._covariance.between(queries, self._points)
        half = solve_triangular(self._factor, cross.T, lower=True, check_finite=False)
        variance = self._covariance.variance(queries) - np.square(half).sum(0)
        return self.mean + cross @ self._solved, np.sqrt(np.maximum(variance, self._least))

    def predict_joint(self, queries: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return means, shape (queries, draws), and the noise-free covariance, shape (queries, queries)."""
        cross = self._covariance.between(queries, self._points)
        half = solve_triangular(self._factor, cross.T, lower=True, check_finite=False)
        return self.mean + cross @ self._solved, self._covariance.between(queries, queries) - half.T @ half
