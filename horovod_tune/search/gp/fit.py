"""A Gaussian process with a constant mean and noise; its Matérn-5/2 kernel is fitted by MAP.

The hyperparameters maximise the marginal likelihood times log-normal priors; the length scales' prior grows
with the dimension as in Hvarfner et al. (2024), without which a maximum-likelihood fit to a few dozen points
is overconfident.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg.lapack import dpotrf, dpotri, dtrtrs
from scipy.optimize import minimize

from horovod_tune.search.gp.kernels import (
    SQRT5,
    FloatArray,
    Hyperparameters,
    matern52,
    squared_distances,
    trend,
    warp,
)

#: How far an axis may be warped: about as if it were logarithmic over six powers of ten.
_MAX_WARP = 14.0
#: Added to the diagonal, relative to the signal, so that close points do not make it singular.
JITTER = 1e-8


@dataclass(frozen=True)
class Priors:
    """Means and standard deviations of the normal priors on the logarithms of the hyperparameters."""

    length_mean: float = -1.0
    length_std: float = math.sqrt(3.0)
    #: Added to `length_mean` as half the logarithm of the number of parameters, times this.
    length_growth: float = 1.0
    signal_mean: float = 0.0
    signal_std: float = 0.7
    noise_mean: float = -7.0
    noise_std: float = 2.5
    #: Of the warps of the axes themselves, which are 0 where nothing is known; see `kernels.warp`.
    warp_std: float = 1.5


class Fit(NamedTuple):
    """Fitted hyperparameters, and the logarithm of their posterior density but for constants."""

    hyperparameters: Hyperparameters
    log_posterior: float
    #: The same as the optimiser's numbers, from which another fit can start.
    theta: FloatArray


def fit(
    features: FloatArray,
    targets: FloatArray,
    groups: NDArray[np.int_],
    priors: Priors | None = None,
    fixed_noise: float | None = None,
    starts: range = range(2),
    warpable: NDArray[np.bool_] | None = None,
    warm: FloatArray | None = None,
    iterations: int = 60,
    timed: bool = False,
    task: FloatArray | None = None,
) -> Fit:
    """Return the MAP hyperparameters for standardised `targets`, shape (points,).

    `features` has the shape (points, features), `groups` names the parameter of each feature. `starts` are
    the numbers of the places to start from, of 4; `warm`, the `theta` of an earlier fit, is the only one
    if it is given. `warpable`, shape (parameters,), are the parameters whose axes may be warped.
    `task`, shape (points,), is an earlier task there, whose weight is integrated out (see `earlier_task`).
    """
    objective = MarginalLikelihood(
        features, targets, groups, priors or Priors(), fixed_noise, warpable, timed, task
    )
    places = objective.starts(starts.stop)[starts.start :] if warm is None else [warm]
    options = {"maxiter": iterations}
    found = [
        minimize(objective, place, jac=True, method="L-BFGS-B", bounds=objective.bounds, options=options)
        for place in places
    ]
    best = min(found, key=lambda result: result.fun)
    return Fit(objective.hyperparameters(best.x), -float(best.fun), best.x)


class MarginalLikelihood:
    """The negative log posterior of the hyperparameters' logarithms and of the warps, and its gradient.

    The hyperparameters are, in this order: a length scale for each parameter, the signal, the noise, and a
    warp for each parameter whose axis may be warped.
    """

    def __init__(
        self,
        features: FloatArray,
        targets: FloatArray,
        groups: NDArray[np.int_],
        priors: Priors,
        fixed_noise: float | None,
        warpable: NDArray[np.bool_] | None = None,
        timed: bool = False,
        task: FloatArray | None = None,
    ) -> None:
        #: What is added to the kernel's covariance and has no hyperparameters.
        self._fixed: FloatArray = np.zeros((len(features), len(features)))
        if timed:
            self._fixed += trend(features[:, -1], features[:, -1])
        if task is not None:
            self._fixed += np.outer(task, task)
        self._targets, self._features, self._groups = targets, features, groups
        count = int(groups.max()) + 1 if len(groups) else 0
        self._warped = np.flatnonzero(warpable) if warpable is not None else np.empty(0, dtype=int)
        #: A parameter whose axis may be warped has one feature.
        self._warped_columns = np.asarray(
            [int(np.flatnonzero(groups == g)[0]) for g in self._warped], dtype=int
        )
        #: Adds up what belongs to one parameter, shape (features, parameters).
        self._by_group = np.equal.outer(groups, np.arange(count)).astype(float)
        self._fixed_noise = fixed_noise
        growth = 0.5 * math.log(max(count, 1)) * priors.length_growth
        warps = len(self._warped)
        self._count = count
        #: Of the normal priors on the numbers of `theta`.
        self.means = np.concatenate(
            [
                np.full(count, priors.length_mean + growth),
                [priors.signal_mean, priors.noise_mean],
                np.zeros(warps),
            ]
        )
        self.stds = np.concatenate(
            [
                np.full(count, priors.length_std),
                [priors.signal_std, priors.noise_std],
                np.full(warps, priors.warp_std),
            ]
        )
        self.bounds = (
            [(math.log(5e-3), math.log(1e3))] * count
            + [(-5.0, 5.0), (math.log(1e-8), math.log(2.0))]
            + [(-_MAX_WARP, _MAX_WARP)] * warps
        )

    def starts(self, number: int) -> list[FloatArray]:
        lengths = [0.5, 2.0, 0.1, 8.0][:number]
        noises = [1e-4, 1e-2, 1e-2, 1e-1]
        unwarped = np.zeros(len(self._warped))
        return [
            np.concatenate([np.full(self._count, math.log(length)), [0.0, math.log(noise)], unwarped])
            for length, noise in zip(lengths, noises, strict=False)
        ]

    def hyperparameters(self, theta: FloatArray) -> Hyperparameters:
        count = self._count
        noise = self._fixed_noise if self._fixed_noise is not None else math.exp(theta[count + 1])
        warps = None
        if len(self._warped):
            warps = np.zeros(count)
            warps[self._warped] = theta[count + 2 :]
        return Hyperparameters(np.exp(theta[:count]), math.exp(theta[count]), noise, warps)

    def _on_axes(self, theta: FloatArray, h: Hyperparameters) -> tuple[FloatArray, FloatArray | None]:
        """Return the features on warped and scaled axes, and the slopes of the warped ones by their warps."""
        features, slopes = self._features, None
        if len(self._warped):
            warped, _, slopes = warp(features[:, self._warped_columns], theta[self._count + 2 :])
            features = features.copy()
            features[:, self._warped_columns] = warped
        return (features / h.lengths[self._groups] if self._count else features), slopes

    def log_likelihood(self, theta: FloatArray) -> float:
        """Return the log marginal likelihood up to a constant; -inf beyond the bounds."""
        low, high = np.asarray(self.bounds).T
        if np.any(theta < low) or np.any(theta > high):
            return -math.inf
        h = self.hyperparameters(theta)
        scaled, _ = self._on_axes(theta, h)
        covariance = h.signal * matern52(squared_distances(scaled, scaled))
        covariance += self._fixed
        covariance.flat[:: len(covariance) + 1] += h.noise + JITTER * h.signal
        factor, failed = dpotrf(covariance.T, lower=1, clean=0, overwrite_a=1)
        if failed:
            return -math.inf
        both = np.stack([np.ones(len(self._targets)), self._targets], axis=1)
        half, _ = dtrtrs(factor, both, lower=1)
        ones, targets = half.T
        residual = targets - (ones @ targets) / (ones @ ones) * ones
        return float(-0.5 * residual @ residual - np.log(factor.diagonal()).sum())

    def __call__(self, theta: FloatArray) -> tuple[float, FloatArray]:
        count = self._count
        h = self.hyperparameters(theta)
        scaled, slopes = self._on_axes(theta, h)
        squared = squared_distances(scaled, scaled)
        root = np.sqrt(squared)
        root *= SQRT5
        decay = np.exp(-root)
        root += 1.0
        # In the order of the formula: 1 + root for the slopes below, then the correlation.
        slope_decay = root * decay
        squared *= 5.0 / 3.0
        squared += root
        squared *= decay
        correlation = squared
        covariance = h.signal * correlation
        covariance += self._fixed
        covariance.flat[:: len(covariance) + 1] += h.noise + JITTER * h.signal
        # The transpose of a symmetric matrix, in the order of memory that LAPACK needs no copy of.
        factor, failed = dpotrf(covariance.T, lower=1, clean=1, overwrite_a=1)
        if failed:
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
        inverse -= np.outer(solved, solved)
        inverse *= 0.5
        outer = inverse
        trace = outer.trace()
        # Sums over all pairs of points: with S the slopes by the squared distances, the sum of
        # S_ij (a_i - a_j)(b_i - b_j) is 2 (sum_i r_i a_i b_i - a S b), r being the sums of the rows of S.
        slope_decay *= outer
        slope_decay *= -5.0 / 6.0 * h.signal
        slope = slope_decay
        rows = slope.sum(axis=1)
        across = slope @ scaled
        by_feature = 2.0 * (rows @ np.square(scaled) - np.einsum("ij,ij->j", scaled, across))
        gradient = np.empty_like(theta)
        gradient[:count] = -2.0 * by_feature @ self._by_group
        gradient[count] = np.vdot(outer, correlation) * h.signal + JITTER * h.signal * trace
        gradient[count + 1] = 0.0 if self._fixed_noise is not None else trace * h.noise
        if slopes is not None:
            own = scaled[:, self._warped_columns]
            moved = slopes / h.lengths[self._warped]
            gradient[count + 2 :] = 4.0 * (
                rows @ (own * moved) - np.einsum("ij,ij->j", moved, across[:, self._warped_columns])
            )
        return float(value), gradient + standard / self.stds
