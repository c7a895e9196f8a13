"""The acquisition for several metrics: the expected gain in the front's hypervolume."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp
from scipy.stats import norm, qmc

from horovod_tune.scoring import non_dominated
from horovod_tune.search.gp.acquisition import PosteriorDraws
from horovod_tune.search.gp.feasibility import Feasibility
from horovod_tune.search.gp.kernels import FloatArray

#: Pairs of a direction and of a draw at the query, for each draw of the results.
_PAIRS = 16
#: The reference is this share of the front's range below its worst values.
_BELOW = 0.1
#: Gains are smoothed over this share of what the front dominates along a direction, so they can be climbed.
_SMOOTHING = 1e-3


class HypervolumeGain:
    r"""The logarithm of the expected hypervolume improvement over a front, for independent metrics.

    The hypervolume that points dominate above a reference r is, up to a constant, the mean of
    :math:`\max_y (\min_m (y_m - r_m)/\lambda_m)^M` over directions :math:`\lambda` on the unit sphere's
    positive part (Golovin and Zhang, 2020, lemma 5). A point's gain is how far its own value exceeds that
    maximum, averaged over directions and over joint draws of the metrics there, all maximised.

    `drawn` has a posterior for each metric, on the same points; `allowed`, shape (points,), selects the ones
    that may belong to the front, at least one. The reference is below each metric's worst value on the front
    of the results and of the values expected at `pool`, shape (queries, features), so that a partly known
    front can also grow at its ends.
    """

    def __init__(
        self,
        drawn: Sequence[PosteriorDraws],
        allowed: NDArray[np.bool_],
        feasibility: Feasibility,
        seed: int,
        pool: FloatArray,
    ) -> None:
        self._drawn, self._feasibility = drawn, feasibility
        values = np.stack([one.values for one in drawn])  # (metrics, points, draws)
        count, _, draws = values.shape
        uniform = qmc.Sobol(2 * count, seed=np.random.default_rng(seed)).random(_PAIRS * draws)
        normal = norm.ppf(np.clip(uniform, 1e-9, 1 - 1e-9)).T.reshape(2 * count, draws, _PAIRS)
        directions = np.abs(normal[:count]) + 1e-9
        self._directions = directions / np.linalg.norm(directions, axis=0)
        self._normal = normal[count:]
        mean = values.mean(axis=2)
        seen = mean[:, allowed]
        expected = np.stack([one.process.predict(pool)[0].mean(axis=1) for one in drawn])
        expected = expected[:, feasibility(pool) > np.log(0.5)]
        outcomes = np.concatenate([seen, expected], axis=1).T
        front = outcomes[non_dominated(outcomes, ["max"] * count)].T
        best, worst = front.max(axis=1), front.min(axis=1)
        span = np.where(best > worst, best - worst, np.maximum(mean.std(axis=1), 1e-6))
        self._reference = (worst - _BELOW * span)[:, None, None, None]
        # Directions in units of the front's range: metrics count alike whatever their own units.
        self._units = span[:, None, None, None]
        reached = self._along(values[:, allowed][..., None])  # (points, draws, pairs)
        self._reached = np.maximum(reached.max(axis=0), 0.0)
        self._smoothing = _SMOOTHING * max(float(self._reached.mean()), _BELOW**count)

    def _along(self, values: FloatArray) -> FloatArray:
        """Return how far values, shape (metrics, points, draws, 1 or pairs), reach, to the power of M."""
        least = ((values - self._reference) / self._units / self._directions[:, None]).min(axis=0)
        return np.sign(least) * np.abs(least) ** len(values)

    def __call__(self, features: FloatArray) -> FloatArray:
        """Return the logarithm of the gain, shape (queries,), at `features`, shape (queries, features)."""
        # In pieces, since each query has hundreds of draws.
        pieces = [self._log_gain(features[i : i + 256]) for i in range(0, len(features), 256)]
        return np.concatenate(pieces) + self._feasibility(features)

    def _log_gain(self, features: FloatArray) -> FloatArray:
        values = []
        for one, normal in zip(self._drawn, self._normal, strict=True):
            means, stds = one.process.predict(features)
            values.append(means[:, :, None] + stds[:, None, None] * normal[None])
        excess = (self._along(np.stack(values)) - self._reached) / self._smoothing
        # log(log(1 + exp(excess))), which far below 0 is the excess itself.
        soft = np.where(excess < -30, excess, np.log(np.logaddexp(0.0, np.maximum(excess, -30))))
        return np.asarray(logsumexp(soft, axis=(1, 2))) - np.log(soft[0].size)
