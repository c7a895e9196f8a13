"""Several metrics at once: the Pareto front of an experiment's results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from horovod_tune import bounds
from horovod_tune.analysis import frames
from horovod_tune.analysis.reader.plain_values import iteration_of
from horovod_tune.analysis.results import Results
from horovod_tune.scoring import hypervolume, kept, known_values, non_dominated, value_of


@dataclass(frozen=True)
class ParetoFront:
    """An experiment's results that no other result dominates in several metrics.

    `points` has all results that were compared, shape (points, metrics). For each of them, `places` has the
    indices of its trial and report, and `on_front` is True if it is on the front. `members` are the front's
    indices in `points`, sorted by the first metric, best first.
    """

    analysis: Results
    metrics: dict[str, str]
    points: np.ndarray
    places: list[tuple[int, int]]
    on_front: np.ndarray
    members: np.ndarray

    def dataframe(self) -> pd.DataFrame:
        """Return one row per result of the front, sorted by the first metric, best first.

        Columns: trial_id, training_iteration, the metrics, and the configuration as config/….
        """
        made = []
        for point in self.members:
            number, report = self.places[point]
            trial = self.analysis.trials[number]
            row = trial.reports[report]
            values = dict(zip(self.metrics, self.points[point].tolist(), strict=True))
            config = row["config"] if isinstance(row.get("config"), dict) else trial.config
            origin = {"trial_id": trial.trial_id, "training_iteration": iteration_of(row)}
            made.append(origin | values | frames.flatten(config, "config/"))
        return frames.frame(made)

    @property
    def reference(self) -> dict[str, float]:
        """The worst value of each metric among all results: the default reference of `hypervolume`."""
        finite = self.points[np.isfinite(self.points).all(axis=1)]
        modes = zip(self.metrics.items(), finite.T, strict=True)
        worst = {"min": np.max, "max": np.min}
        return {name: float(worst[mode](v)) if len(v) else math.nan for (name, mode), v in modes}

    def hypervolume(self, reference: Mapping[str, float] | None = None) -> float:
        """Return the volume that the front dominates up to `reference`, which has a value for each metric.

        To compare experiments, pass the same reference for each. See `scoring.hypervolume`.
        """
        corner = self.reference
        if reference is not None:
            if not isinstance(reference, Mapping) or set(reference) != set(self.metrics):
                raise ValueError(f"reference must have the keys {sorted(self.metrics)}, got {reference!r}")
            corner = {name: bounds.number(f"reference[{name!r}]", reference[name]) for name in reference}
        modes = list(self.metrics.values())
        return hypervolume(self.points[self.on_front], [corner[name] for name in self.metrics], modes)

    def __repr__(self) -> str:
        return f"<ParetoFront of {self.analysis.name!r}: {int(self.on_front.sum())} of {len(self.points)}>"

    def _repr_html_(self) -> str:
        return self.dataframe().to_html(index=False)


def pareto_front(analysis: Results, metrics: Mapping[str, str]) -> ParetoFront:
    """See `Analysis.pareto_front`."""
    if not isinstance(metrics, Mapping) or len(metrics) < 2:
        example = '{"accuracy": "max", "latency_ms": "min"}'
        raise ValueError(f"metrics must name at least two metrics, like {example}, got {metrics!r}")
    for name, mode in metrics.items():
        if mode not in ("min", "max"):
            raise ValueError(f'the mode of {name!r} must be "min" or "max", got {mode!r}')
    named = (*metrics, *(limit.metric for limit in analysis.limits))
    for name in named:
        analysis.require_reported(name)
    points, places = [], []
    for number, trial in enumerate(analysis.trials):
        allowed = kept(trial.reports, analysis.limits)
        results = list(enumerate(known_values(trial.reports, list(metrics))))
        for report, values in results if analysis.scope == "all" else results[-1:]:
            row = trial.reports[report]
            new = analysis.scope == "last" or any(value_of(row, name) is not None for name in named)
            if new and allowed[report] and None not in values:
                points.append(values)
                places.append((number, report))
    array = np.array(points, dtype=float).reshape(len(points), len(metrics))
    on_front = non_dominated(array, list(metrics.values()))
    members = np.flatnonzero(on_front)
    first = array[members, 0] * (1.0 if next(iter(metrics.values())) == "min" else -1.0)
    members = members[np.argsort(first, kind="stable")]
    return ParetoFront(analysis, dict(metrics), array, places, on_front, members)
