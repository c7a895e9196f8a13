"""What a search looks for, and its history: every trial that it suggested or adopted, and how it ended."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from horovod_tune.scoring import Limit, as_number, parse_limit
from horovod_tune.search.gp.feasibility import diverged
from horovod_tune.search.gp.kernels import FloatArray
from horovod_tune.search.space.search_space import Point


class Ending(str, Enum):
    """The state of a trial."""

    RUNNING = "running"
    #: It ended, in any way, with a finite metric.
    SCORED = "scored"
    #: It raised an error, or its metric was NaN or infinite.
    FAILED = "failed"
    #: It ended without a metric, so nothing was learned.
    UNKNOWN = "unknown"


@dataclass
class Trial:
    """One trial of the search; `value` is the metric that it ended with, `last` the latest reported."""

    trial_id: str
    point: Point
    ending: Ending = Ending.RUNNING
    value: float | None = None
    last: float | None = None
    #: The finite values that it reported, by time (usually the epoch).
    curve: dict[float, float] = field(default_factory=dict)
    #: The latest values of the search's other metrics, including those of its limits.
    others: dict[str, float] = field(default_factory=dict)

    def add_report(self, time: float | None, value: float | None) -> None:
        """Add a report to the curve if its time and value are finite numbers."""
        if time is not None and math.isfinite(time) and value is not None and math.isfinite(value):
            self.curve[time] = value

    def end(self, value: float | None, error: bool) -> None:
        """Record how it ended; a trial that is run again after a failure may end a second time."""
        self.value = None
        if error or (value is not None and not math.isfinite(value)):
            self.ending = Ending.FAILED
        elif value is None:
            self.ending = Ending.UNKNOWN
        else:
            self.ending, self.value = Ending.SCORED, value

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "ending": self.ending.value, "curve": list(self.curve.items())}

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Trial:
        point = tuple(float(c) for c in entry["point"])
        curve = {float(time): float(value) for time, value in entry.get("curve", ())}
        others = dict(entry.get("others", {}))
        ending = Ending(entry["ending"])
        return cls(entry["trial_id"], point, ending, entry["value"], entry["last"], curve, others)


@dataclass
class History:
    """All trials in the order of their suggestion, which does not depend on when they ended."""

    trials: dict[str, Trial] = field(default_factory=dict)
    #: Points drawn so far from the quasi-random sequence, including skipped ones.
    drawn: int = 0
    #: Results of an earlier experiment (`analysis`), not of this search.
    earlier: list[Trial] = field(default_factory=list)

    @property
    def counts(self) -> Counter[Point]:
        """How often each point has been suggested."""
        return Counter(trial.point for trial in self.trials.values())

    def add(self, trial_id: str, point: Point) -> Trial:
        self.trials[trial_id] = Trial(trial_id, point)
        return self.trials[trial_id]

    def add_known(self, source: str, point: Point, value: float | None, error: bool = False) -> None:
        """Add a trial that was evaluated elsewhere; its id is `source` and a number."""
        self.add(f"{source}-{len(self.trials)}", point).end(value, error)

    def rounds(self, size: float) -> int:
        """Return how often every point of a space of `size` points has been suggested already."""
        counts = self.counts
        return min(counts.values()) if counts and len(counts) >= size else 0

    def as_json(self) -> dict[str, Any]:
        """Return the part of a saved search that `from_json` reads."""
        return {
            "drawn": self.drawn,
            "trials": [trial.as_json() for trial in self.trials.values()],
            "earlier": [trial.as_json() for trial in self.earlier],
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> History:
        trials = [Trial.from_json(entry) for entry in state["trials"]]
        earlier = [Trial.from_json(entry) for entry in state.get("earlier", ())]
        return cls({trial.trial_id: trial for trial in trials}, state["drawn"], earlier)


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

    def keep_limits(self, trials: Sequence[Trial]) -> NDArray[np.bool_]:
        """Return which trials' latest values keep every limit; an unknown value breaks its limit."""
        kept = (
            all(limit.kept_by(self.latest(trial, limit.metric)) for limit in self.limits) for trial in trials
        )
        return np.fromiter(kept, dtype=bool)

    def final_value(self, trial: Trial, value: float | None) -> float | None:
        """Return the first metric's `value`; if any metric is unknown or not finite, return that instead."""
        values = [value, *(trial.others.get(metric) for metric in self.metrics[1:])]
        if None in values:
            return None
        return next((each for each in values if each is not None and not math.isfinite(each)), value)

    def scores(self, trials: Sequence[Trial], metric: str) -> FloatArray:
        """Return the latest values of one of `metrics`, larger being better, shape (trials,)."""
        latest = np.asarray([self.latest(trial, metric) for trial in trials], dtype=float)
        return latest if self.modes[self.metrics.index(metric)] == "max" else -latest

    def split_failed(self, history: History) -> tuple[list[Trial], list[Trial]]:
        """Return the trials with usable metrics, and those that failed or diverged."""
        failed = [trial for trial in history.trials.values() if trial.ending is Ending.FAILED]
        others = [trial for trial in history.trials.values() if trial.ending is not Ending.FAILED]
        lost: set[int] = set()
        for metric in self.metrics:
            scores = self.scores(others, metric)
            finite = np.flatnonzero(np.isfinite(scores))
            lost |= {*finite[diverged(-scores[finite])].tolist()}
        usable = [trial for i, trial in enumerate(others) if i not in lost]
        return usable, failed + [others[i] for i in sorted(lost)]

    def other_metrics_in(self, result: Mapping[str, Any]) -> dict[str, float]:
        """Return a report's numbers for all metrics but the first, including those of the limits."""
        names = {*self.metrics[1:], *(limit.metric for limit in self.limits)} - {self.metrics[0]}
        numbers = {name: as_number(result.get(name)) for name in sorted(names)}
        return {name: value for name, value in numbers.items() if value is not None}


def parse_limits(limits: Sequence[str]) -> tuple[Limit, ...]:
    """Read limits such as ``["latency_ms <= 20"]``; raises `TypeError` or `ValueError` for anything else."""
    if isinstance(limits, str):
        raise TypeError(f"limits must be a list, as in limits=[{limits!r}]")
    if not isinstance(limits, list | tuple) or not all(isinstance(limit, str) for limit in limits):
        raise TypeError(f'limits must be a list such as ["latency_ms <= 20"], got {limits!r}')
    return tuple(parse_limit(limit) for limit in limits)


def reward(value: Any) -> float | None:
    """Return a value that the user gives as a float; None if it is not a number, as True is not."""
    return None if isinstance(value, (bool, np.bool_)) else as_number(value)


def seed_for(seed: int, history: History, purpose: str) -> int:
    """Return a separate seed for each suggestion and each purpose in it."""
    words = [seed, len(history.trials), *purpose.encode()]
    return int(np.random.SeedSequence(words).generate_state(1)[0])
