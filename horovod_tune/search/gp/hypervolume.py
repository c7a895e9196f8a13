"""What is worth trying where several metrics count: the expected gain of the front's hypervolume."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm, qmc

from horovod_tune.analysis.dominance import non_dominated
from horovod_tune.search.gp.chances import Chance
from horovod_tune.search.gp.drawn import Drawn
from horovod_tune.search.gp.kernels import FloatArray

#: Pairs of a direction and of a draw at the query, for each draw of the results.
_PAIRS = 16
#: The reference lies this share of the front's range below its worst values.
_BELOW = 0.1
#: Gains are smoothed over this share of what the front dominates along a direction, to be climbed from afar.
_SMOOTHING = 1e-3
_STEP = 1e-5


class HypervolumeGain:
    r"""The logarithm of the expected hypervolume improvement over a front, for independent metrics.

    The hypervolume that points dominate up to a reference r is, up to a constant, the mean over directions
    :math:`\lambda` of the unit sphere's positive part of :math:`\max_y (\min_m (y_m - r_m)/\lambda_m)^M`
    (Golovin and Zhang, 2020, lemma 5), so its gain at a point is the mean, over directions and over the
    metrics' joint draws there, of how far the point's own value exceeds that maximum. Works for any number of
    metrics and of points in flight. All metrics are to be maximised here.

    `drawn` has a belief for each metric, on the same points; `allowed`, shape (points,), tells which of them
    may belong to the front. The reference is below the worst allowed value of each metric on the front.
    """

    def __init__(
        self,
        drawn: Sequence[Drawn],
        allowed: NDArray[np.bool_],
        chance: Chance | None,
        seed: int,
    ) -> None:
        self._drawn, self._chance = drawn, chance
        self.rows = len(drawn[0].values)
        values = np.stack([one.values for one in drawn])  # (metrics, points, draws)
        count, _, draws = values.shape
        uniform = qmc.Sobol(2 * count, seed=np.random.default_rng(seed)).random(_PAIRS * draws)
        normal = norm.ppf(np.clip(uniform, 1e-9, 1 - 1e-9)).T.reshape(2 * count, draws, _PAIRS)
        directions = np.abs(normal[:count]) + 1e-9
        self._directions = directions / np.linalg.norm(directions, axis=0)
        self._normal = normal[count:]
        mean = values.mean(axis=2)
        front = non_dominated(np.where(allowed[:, None], mean.T, np.nan), ["max"] * count)
        best, worst = mean[:, front].max(axis=1), mean[:, front].min(axis=1)
        span = np.where(best > worst, best - worst, np.maximum(mean.std(axis=1), 1e-6))
        self._reference = (worst - _BELOW * span)[:, None, None, None]
        # Directions in units of the front's range: metrics count alike whatever theirs are.
        self._units = span[:, None, None, None]
        reached = self._along(values[:, allowed][..., None])  # (points, draws, pairs)
        self._reached = np.maximum(reached.max(axis=0), 0.0)
        self._smoothing = _SMOOTHING * max(float(self._reached.mean()), _BELOW**count)

    def _along(self, values: FloatArray) -> FloatArray:
        """Return the M-th power of how far values, shape (metrics, points, draws, 1 or pairs), reach."""
        ratios = (values - self._reference) / self._units / self._directions[:, None]
        least = ratios.min(axis=0)
        return np.sign(least) * np.abs(least) ** len(values)

    def __call__(self, features: FloatArray) -> FloatArray:
        """Return the logarithm of the gain, shape (queries,), at `features`, shape (queries, features)."""
        # In pieces, since each query has hundreds of draws.
        pieces = [self._log_gain(features[i : i + 256]) for i in range(0, len(features), 256)]
        return np.concatenate(pieces) if pieces else np.empty(0)

    def _log_gain(self, features: FloatArray) -> FloatArray:
        values = []
        for one, normal in zip(self._drawn, self._normal, strict=True):
            means, stds = one.process.predict(features)
            values.append(means[:, :, None] + stds[:, None, None] * normal[None])
        excess = (self._along(np.stack(values)) - self._reached) / self._smoothing
        # The logarithm of the mean of log(1 + exp(excess)), which is exp(excess) itself far below 0.
        soft = np.where(excess < -30, excess, np.log(np.logaddexp(0.0, np.maximum(excess, -30))))
        top = soft.max(axis=(1, 2))
        gain = top + np.log(np.exp(soft - top[:, None, None]).mean(axis=(1, 2)))
        return gain if self._chance is None else gain + self._chance.log_probability(features)

    def with_slope(self, query: FloatArray) -> tuple[float, FloatArray]:
        """Return the same at one query, and its gradient, shape (features,), by differences."""
        steps = _STEP * np.eye(len(query))
        values = self(np.concatenate([query[None], query + steps, query - steps]))
        ahead, behind = values[1 : len(query) + 1], values[len(query) + 1 :]
        return float(values[0]), (ahead - behind) / (2 * _STEP)
