"""The objectives of a search: one or several metrics, within limits on these or on others."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_tune.analysis.scoring import Limit, parse_limit
from horovod_tune.search.gp.feasibility import diverged
from horovod_tune.search.history import Ending, History, Trial, as_number


@dataclass(frozen=True)
class Objectives:
    """`metrics` with the mode of each, "min" or "max"; `Trial.value` is a value of the first metric."""

    metrics: tuple[str, ...]
    modes: tuple[str, ...]
    limits: tuple[Limit, ...] = ()

    def latest(self, trial: Trial, metric: str) -> float | None:
        """Return the last value of a metric that a trial reported."""
        if metric != self.metrics[0]:
            return trial.others.get(metric)
        return trial.last if trial.value is None else trial.value

    def keeps_limits(self, trial: Trial) -> bool:
        """Return True if a trial's latest values keep every limit; an unknown value breaks its limit."""
        return all(limit.kept_by(self.latest(trial, limit.metric)) for limit in self.limits)

    def final_value(self, trial: Trial, value: float | None) -> float | None:
        """Return the first metric's `value`; if any metric is unknown or not finite, return that instead."""
        values = [value, *(trial.others.get(metric) for metric in self.metrics[1:])]
        if None in values:
            return None
        return next((each for each in values if each is not None and not math.isfinite(each)), value)

    def score(self, trial: Trial, metric: str) -> float | None:
        """Return a trial's latest value of one of `metrics`, larger being better."""
        value = self.latest(trial, metric)
        if value is None or self.modes[self.metrics.index(metric)] == "max":
            return value
        return -value

    def split_failed(self, history: History) -> tuple[list[Trial], list[Trial]]:
        """Return the trials with usable metrics, and those that failed or diverged."""
        failed = [trial for trial in history.trials.values() if trial.ending is Ending.FAILED]
        others = [trial for trial in history.trials.values() if trial.ending is not Ending.FAILED]
        lost: set[int] = set()
        for metric in self.metrics:
            scores = [self.score(trial, metric) for trial in others]
            known = [i for i, gain in enumerate(scores) if gain is not None and math.isfinite(gain)]
            beyond = diverged(-np.asarray([scores[i] for i in known], dtype=float))
            lost |= {known[i] for i in np.flatnonzero(beyond)}
        usable = [trial for i, trial in enumerate(others) if i not in lost]
        return usable, failed + [others[i] for i in sorted(lost)]

    def other_metrics_in(self, result: Mapping[str, Any]) -> dict[str, float]:
        """Return a report's numbers for all metrics but the first, including those of the limits."""
        names = {*self.metrics[1:], *(limit.metric for limit in self.limits)} - {self.metrics[0]}
        found = {name: as_number(result.get(name)) for name in sorted(names)}
        return {name: value for name, value in found.items() if value is not None}


def parse_limits(limits: Sequence[str]) -> tuple[Limit, ...]:
    """Read limits such as ``["latency_ms <= 20"]``; raises `TypeError` or `ValueError` for anything else."""
    if isinstance(limits, str):
        raise TypeError(f"limits must be a list, as in limits=[{limits!r}]")
    if not isinstance(limits, list | tuple) or not all(isinstance(limit, str) for limit in limits):
        raise TypeError(f'limits must be a list such as ["latency_ms <= 20"], got {limits!r}')
    return tuple(parse_limit(limit) for limit in limits)
