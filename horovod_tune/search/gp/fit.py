"""A Gaussian process with a constant mean and noise; its Matérn-5/2 kernel is fitted by MAP.

The length scales' log-normal prior grows with the dimension as in Hvarfner et al. (2024); without priors, a
maximum-likelihood fit to a few dozen points is overconfident.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_solve, cholesky
from scipy.linalg.lapack import dpotrf, dpotri, dtrtrs
from scipy.optimize import minimize

from horovod_tune.search.gp.kernels import (
    SQRT5,
    FloatArray,
    Hyperparameters,
    MaternCovariance,
    matern52,
    squared_distances,
    trend,
)

#: Added to the diagonal, relative to the signal, so that close points do not make the matrix singular.
JITTER = 1e-8


class MarginalLikelihood:
    """The negative log posterior of the hyperparameters' logarithms, and its gradient.

    The hyperparameters are, in this order: a length scale for each parameter, the signal, the noise.
    `features` has the shape (points, features), `targets`, standardised, (points,); `groups` has the index of
    each feature's parameter. If `timed`, the last feature is the time of a report. `task`, shape (points,),
    is an earlier task's mean at `features`, whose weight is integrated out (see `kernels`). `lengths` is mean
    (for one parameter; it grows with the square root of their number) and standard deviation of the normal
    prior on the length scales' logarithms, `signal_std` the deviation for the signal.
    """

    def __init__(
        self,
        features: FloatArray,
        targets: FloatArray,
        groups: NDArray[np.int_],
        fixed_noise: float | None = None,
        timed: bool = False,
        task: FloatArray | None = None,
        lengths: tuple[float, float] = (-1.0, math.sqrt(3.0)),
        signal_std: float = 0.7,
    ) -> None:
        #: The part of the covariance that has no hyperparameters.
        self._fixed: FloatArray = np.zeros((len(features), len(features)))
        if timed:
            self._fixed += trend(features[:, -1], features[:, -1])
        if task is not None:
            self._fixed += np.outer(task, task)
        self._targets, self._features, self._groups = targets, features, groups
        self._fixed_noise = fixed_noise
        self._count = count = int(groups.max()) + 1
        #: Sums features by parameter, shape (features, parameters).
        self._by_group = np.equal.outer(groups, np.arange(count)).astype(float)
        #: Means and standard deviations of the normal priors on `theta`.
        self.means = np.append(np.full(count, lengths[0] + 0.5 * math.log(count)), [0.0, -7.0])
        self.stds = np.append(np.full(count, lengths[1]), [signal_std, 2.5])
        length = (math.log(5e-3), math.log(1e3))
        self.bounds = [length] * count + [(-5.0, 5.0), (math.log(1e-8), math.log(2.0))]

    def starts(self) -> list[FloatArray]:
        """Return four starting points."""
        return [
            np.append(np.full(self._count, math.log(length)), [0.0, math.log(noise)])
            for length, noise in ((0.5, 1e-4), (2.0, 1e-2), (0.1, 1e-2), (8.0, 1e-1))
        ]

    def hyperparameters(self, theta: FloatArray) -> Hyperparameters:
        count = self._count
        noise = self._fixed_noise if self._fixed_noise is not None else math.exp(theta[count + 1])
        return Hyperparameters(np.exp(theta[:count]), math.exp(theta[count]), noise)

    def _factorised(
        self, theta: FloatArray
    ) -> tuple[Hyperparameters, FloatArray, FloatArray, FloatArray | None]:
        """Return hyperparameters, scaled features, their squared distances, and the Cholesky factor."""
        h = self.hyperparameters(theta)
        scaled = self._features / h.lengths[self._groups]
        squared = squared_distances(scaled, scaled)
        covariance = h.signal * matern52(squared)
        covariance += self._fixed
        covariance.flat[:: len(covariance) + 1] += h.noise + JITTER * h.signal
        # The transpose of a symmetric matrix is equal and in LAPACK's memory order, so it is not copied.
        factor, failed = dpotrf(covariance.T, lower=1, clean=1, overwrite_a=1)
        return h, scaled, squared, None if failed else factor

    def log_likelihood(self, theta: FloatArray) -> float:
        """Return the log marginal likelihood up to a constant; -inf beyond the bounds."""
        low, high = np.asarray(self.bounds).T
        if np.any(theta < low) or np.any(theta > high):
            return -math.inf
        *_, factor = self._factorised(theta)
        if factor is None:
            return -math.inf
        both = np.stack([np.ones(len(self._targets)), self._targets], axis=1)
        ones, targets = dtrtrs(factor, both, lower=1)[0].T
        residual = targets - (ones @ targets) / (ones @ ones) * ones
        return float(-0.5 * residual @ residual - np.log(factor.diagonal()).sum())

    def __call__(self, theta: FloatArray) -> tuple[float, FloatArray]:
        count = self._count
        h, scaled, squared, factor = self._factorised(theta)
        if factor is None:
            return 1e10, np.zeros_like(theta)
        log_determinant = np.log(factor.diagonal()).sum()
        inverse, _ = dpotri(factor, lower=1, overwrite_c=1)
        diagonal = inverse.diagonal().copy()
        inverse = inverse + inverse.T
        inverse.flat[:: len(inverse) + 1] = diagonal
        sums = inverse.sum(axis=0)
        # The constant mean is at its generalised least squares estimate, which also is its optimum, so
        # it adds nothing to the gradient.
        residual = self._targets - (sums @ self._targets) / sums.sum()
        solved = inverse @ residual
        standard = (theta - self.means) / self.stds
        value = 0.5 * residual @ solved + log_determinant + 0.5 * standard @ standard
        outer = 0.5 * (inverse - np.outer(solved, solved))
        trace = outer.trace()
        # Sums over all pairs: with S the derivatives with respect to the squared distances, the sum of
        # S_ij (a_i - a_j)(b_i - b_j) is 2 (sum_i r_i a_i b_i - a S b), r being the sums of the rows of S.
        root = SQRT5 * np.sqrt(squared)
        slope = -5.0 / 6.0 * h.signal * (1.0 + root) * np.exp(-root) * outer
        rows = slope.sum(axis=1)
        across = slope @ scaled
        by_feature = 2.0 * (rows @ np.square(scaled) - np.einsum("ij,ij->j", scaled, across))
        gradient = np.empty_like(theta)
        gradient[:count] = -2.0 * by_feature @ self._by_group
        gradient[count] = np.vdot(outer, matern52(squared)) * h.signal + JITTER * h.signal * trace
        gradient[count + 1] = 0.0 if self._fixed_noise is not None else trace * h.noise
        return float(value), gradient + standard / self.stds


def fit(
    objective: MarginalLikelihood, starts: Sequence[FloatArray], iterations: int
) -> tuple[FloatArray, float]:
    """Return the best MAP estimate reached from `starts`, and its log posterior density up to a constant."""
    settings = {"jac": True, "method": "L-BFGS-B", "bounds": objective.bounds}
    runs = [minimize(objective, start, **settings, options={"maxiter": iterations}) for start in starts]
    best = min(runs, key=lambda result: result.fun)
    return best.x, -float(best.fun)


#: Steps of the chain from one draw to the next.
_STEPS = 3
#: A step that finds no new position in this many tries stays where it is: the likelihood is too narrow.
_TRIES = 30


def draws(
    likelihood: MarginalLikelihood, start: FloatArray, number: int, generator: np.random.Generator
) -> list[FloatArray]:
    """Return draws of `theta` by elliptical slice sampling from `start` (Murray, Adams & MacKay, 2010)."""
    drawn, theta, height = [], start, likelihood.log_likelihood(start)
    for _ in range(number):
        for _ in range(_STEPS):
            theta, height = _step(likelihood, theta, height, generator)
        drawn.append(theta)
    return drawn


def _step(
    likelihood: MarginalLikelihood, theta: FloatArray, height: float, generator: np.random.Generator
) -> tuple[FloatArray, float]:
    """Return the chain's next state, which is on an ellipse through `theta`, and its log likelihood."""
    means = likelihood.means
    across = likelihood.stds * generator.standard_normal(len(theta))
    least = height + math.log(max(generator.random(), 1e-300))
    angle = generator.uniform(0.0, 2.0 * math.pi)
    low, high = angle - 2.0 * math.pi, angle
    for _ in range(_TRIES):
        proposed = means + (theta - means) * math.cos(angle) + across * math.sin(angle)
        reached = likelihood.log_likelihood(proposed)
        if reached > least:
            return proposed, reached
        low, high = (angle, high) if angle < 0 else (low, angle)
        angle = generator.uniform(low, high)
    return theta, height


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
        half, _ = dtrtrs(self._factor, cross.T, lower=1)
        variance = self._covariance.variance(queries) - np.square(half).sum(0)
        return self.mean + cross @ self._solved, np.sqrt(np.maximum(variance, self._least))

    def predict_joint(self, queries: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return means, shape (queries, draws), and the noise-free covariance, shape (queries, queries)."""
        cross = self._covariance.between(queries, self._points)
        half, _ = dtrtrs(self._factor, cross.T, lower=1)
        return self.mean + cross @ self._solved, self._covariance.between(queries, queries) - half.T @ half
