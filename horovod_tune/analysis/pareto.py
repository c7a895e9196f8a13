"""Several metrics at once: the results that no other one beats in all of them, and their hypervolume."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from horovod_tune.analysis import frames
from horovod_tune.analysis.limits import kept, known_values
from horovod_tune.analysis.reader.tune_fields import iteration_of

if TYPE_CHECKING:
    from horovod_tune.analysis.results import Analysis


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


@dataclass(frozen=True)
class ParetoFront:
    """The results of an experiment that no other one beats in all of several metrics.

    `metrics` maps each to "min" or "max". `points` has all results that were compared, shape (points,
    metrics); `trials` and `rows` say whose each is (the trial's place and its report's), `on_front` which
    of them are the front.
    """

    analysis: Analysis
    metrics: dict[str, str]
    points: np.ndarray
    trials: tuple[int, ...]
    rows: tuple[int, ...]
    on_front: np.ndarray

    @property
    def modes(self) -> list[str]:
        return list(self.metrics.values())

    @property
    def members(self) -> list[int]:
        """The places in `points` of the front, the best of the first metric first."""
        first = self.points[:, 0] * (1.0 if self.modes[0] == "min" else -1.0)
        return sorted(np.flatnonzero(self.on_front).tolist(), key=lambda place: (first[place], place))

    def dataframe(self) -> pd.DataFrame:
        """One row a result of the front, the best of the first metric first.

        Columns: trial_id, training_iteration, the metrics, and the configuration as config/….
        """
        made = []
        for place in self.members:
            trial = self.analysis.trials[self.trials[place]]
            row = self.analysis.reports(trial)[self.rows[place]]
            values = {name: float(self.points[place, n]) for n, name in enumerate(self.metrics)}
            config = row["config"] if isinstance(row.get("config"), dict) else trial.config
            made.append(
                {"trial_id": trial.trial_id, "training_iteration": iteration_of(row)}
                | values
                | frames.flatten(config, "config/")
            )
        return frames.frame(made)

    @property
    def reference(self) -> tuple[float, ...]:
        """The worst value of each metric among all results that were compared: hypervolume's corner."""
        finite = self.points[np.isfinite(self.points).all(axis=1)]
        if not len(finite):
            return (math.nan,) * len(self.metrics)
        pairs = zip(finite.T, self.modes, strict=True)
        return tuple(float(column.max() if mode == "min" else column.min()) for column, mode in pairs)

    def hypervolume(self, reference: Mapping[str, float] | None = None) -> float:
        """Return what the front dominates up to `reference`, a value for each metric; see `hypervolume`.

        To compare experiments, give both the same reference.
        """
        if reference is not None and set(reference) != set(self.metrics):
            raise ValueError(f"reference must have {sorted(self.metrics)}, got {sorted(reference)}")
        corner = self.reference if reference is None else [reference[name] for name in self.metrics]
        return hypervolume(self.points[self.on_front], corner, self.modes)

    def __repr__(self) -> str:
        return f"<ParetoFront of {self.analysis.name!r}: {int(self.on_front.sum())} of {len(self.points)}>"

    def _repr_html_(self) -> str:
        return self.dataframe().to_html(index=False)


def pareto_front(analysis: Analysis, metrics: Mapping[str, str]) -> ParetoFront:
    """See `Analysis.pareto_front`."""
    _check(analysis, metrics)
    points: list[tuple[float, ...]] = []
    trials, places = [], []
    for index, trial in enumerate(analysis.trials):
        rows: Sequence[Mapping[str, Any]] = analysis.reports(trial)
        allowed = kept(rows, analysis.limits)
        at_each = list(known_values(rows, list(metrics)))
        for place in range(len(rows)) if analysis.scope == "all" else range(len(rows))[-1:]:
            values = at_each[place]
            if allowed[place] and all(value is not None for value in values):
                points.append(tuple(value for value in values if value is not None))
                trials.append(index)
                places.append(place)
    array = np.array(points, dtype=float).reshape(len(points), len(metrics))
    front = non_dominated(array, list(metrics.values()))
    return ParetoFront(analysis, dict(metrics), array, tuple(trials), tuple(places), front)


def _check(analysis: Analysis, metrics: Mapping[str, str]) -> None:
    if len(metrics) < 2:
        example = '{"accuracy": "max", "latency_ms": "min"}'
        raise ValueError(f"metrics must have two or more, like {example}, got {dict(metrics)!r}")
    for name, mode in metrics.items():
        if mode not in ("min", "max"):
            raise ValueError(f'the mode of {name!r} must be "min" or "max", got {mode!r}')
        analysis.require_reported(name)
