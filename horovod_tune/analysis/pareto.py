"""Several metrics at once: the results of an experiment that no other one beats in all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from horovod_tune.analysis import frames
from horovod_tune.analysis.reader.plain_values import iteration_of
from horovod_tune.analysis.scoring import hypervolume, kept, known_values, non_dominated

if TYPE_CHECKING:
    from horovod_tune.analysis.results import Analysis


@dataclass(frozen=True)
class ParetoFront:
    """The results of an experiment that no other one beats in all of several metrics.

    `metrics` maps each to "min" or "max". `points` has all results that were compared, shape (points,
    metrics); `trials` and `rows` are the indices of each one's trial and report, `on_front` which of
    them are the front.
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
        """Return one row per result of the front, the best of the first metric first.

        Columns: trial_id, training_iteration, the metrics, and the configuration as config/….
        """
        made = []
        for place in self.members:
            trial = self.analysis.trials[self.trials[place]]
            row = trial.reports[self.rows[place]]
            values = {name: float(self.points[place, n]) for n, name in enumerate(self.metrics)}
            config = row["config"] if isinstance(row.get("config"), dict) else trial.config
            known = {"trial_id": trial.trial_id, "training_iteration": iteration_of(row)}
            made.append(known | values | frames.flatten(config, "config/"))
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
    if len(metrics) < 2:
        example = '{"accuracy": "max", "latency_ms": "min"}'
        raise ValueError(f"metrics must have two or more, like {example}, got {dict(metrics)!r}")
    for name, mode in metrics.items():
        if mode not in ("min", "max"):
            raise ValueError(f'the mode of {name!r} must be "min" or "max", got {mode!r}')
        analysis.require_reported(name)
    points: list[tuple[float | None, ...]] = []
    trials, places = [], []
    for index, trial in enumerate(analysis.trials):
        rows = trial.reports
        allowed = kept(rows, analysis.limits)
        at_each = list(known_values(rows, list(metrics)))
        for place in range(len(rows)) if analysis.scope == "all" else range(len(rows))[-1:]:
            if allowed[place] and None not in at_each[place]:
                points.append(at_each[place])
                trials.append(index)
                places.append(place)
    array = np.array(points, dtype=float).reshape(len(points), len(metrics))
    front = non_dominated(array, list(metrics.values()))
    return ParetoFront(analysis, dict(metrics), array, tuple(trials), tuple(places), front)
