"""Which points no other one beats in all of several metrics, and the hypervolume that they dominate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def non_dominated(values: np.ndarray, modes: Sequence[str]) -> np.ndarray:
    """Return which rows of `values`, shape (points, metrics), no other row dominates; shape (points,), bool.

    A row dominates another when it is at least as good in every metric and better in one; equal rows stay
    together. Rows with NaN or an infinity are never in the front.

    >>> non_dominated(np.array([[1.0, 5.0], [2.0, 4.0], [2.0, 6.0]]), ["min", "min"]).tolist()
    [True, True, False]
    """
    costs = _as_costs(values, modes)
    front = np.isfinite(costs).all(axis=1)
    order = np.flatnonzero(front)
    order = order[np.lexsort(costs[order].T[::-1])]  # a row is dominated by rows before it only
    found: list[int] = []
    for index in order:
        others = costs[found]
        no_worse = (others <= costs[index]).all(axis=1)
        if (no_worse & (others < costs[index]).any(axis=1)).any():
            front[index] = False
        else:
            found.append(int(index))
    return front


def hypervolume(values: np.ndarray, reference: Sequence[float], modes: Sequence[str]) -> float:
    r"""Return the volume that points dominate up to a reference point (Zitzler and Thiele, 1998).

    With every metric turned so that lower is better, that is :math:`\lambda(\bigcup_i [v_i, r])`, the measure
    of the union of boxes from each point to the reference. It grows exactly when a result is found that no
    known one dominates. Computed by slicing along the last metric, exactly; meant for a front of some hundred
    points and up to five metrics. Points that are not better than the reference in every metric add nothing.

    >>> hypervolume(np.array([[1.0, 2.0], [2.0, 1.0]]), [3.0, 3.0], ["min", "min"])
    3.0
    """
    if len(reference) != len(modes):
        raise ValueError(f"reference must have {len(modes)} values, got {len(reference)}")
    costs = _as_costs(values, modes)
    corner = _as_costs(np.asarray([reference], dtype=float), modes)[0]
    inside = np.isfinite(costs).all(axis=1) & (costs < corner).all(axis=1)
    return _volume(costs[inside], corner)


def _volume(costs: np.ndarray, corner: np.ndarray) -> float:
    if not len(costs):
        return 0.0
    if costs.shape[1] == 1:
        return float(corner[0] - costs.min())
    costs = costs[np.argsort(costs[:, -1], kind="stable")]
    heights = np.append(costs[1:, -1], corner[-1]) - costs[:, -1]
    volume = 0.0
    for count, height in enumerate(heights, start=1):
        if height > 0:
            below = costs[:count, :-1]
            front = below[non_dominated(below, ["min"] * below.shape[1])]
            volume += float(height) * _volume(np.unique(front, axis=0), corner[:-1])
    return volume


def _as_costs(values: np.ndarray, modes: Sequence[str]) -> np.ndarray:
    values = np.asarray(values, dtype=float)
    if values.ndim != 2 or values.shape[1] != len(modes):
        raise ValueError(f"values must have the shape (points, {len(modes)}), got {values.shape}")
    return values * np.array([1.0 if mode == "min" else -1.0 for mode in modes])
