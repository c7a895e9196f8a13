"""The history of a search: every trial that it suggested or adopted, and how it ended."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import numpy as np

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
    counts: Counter[Point] = field(default_factory=Counter)
    #: Points drawn so far from the quasi-random sequence, including skipped ones.
    drawn: int = 0
    #: Results of an earlier experiment (`analysis`), not of this search.
    earlier: list[Trial] = field(default_factory=list)

    def add(self, trial: Trial) -> None:
        if trial.trial_id in self.trials:
            self.counts[self.trials[trial.trial_id].point] -= 1
        self.trials[trial.trial_id] = trial
        self.counts[trial.point] += 1

    def add_known(self, source: str, point: Point, value: float | None, error: bool = False) -> None:
        """Add a trial that was evaluated elsewhere; its id is `source` and a number."""
        trial = Trial(f"{source}-{len(self.trials)}", point)
        self.add(trial)
        self.end(trial.trial_id, value, error)

    def end(self, trial_id: str, value: float | None, error: bool) -> None:
        """Record how a trial ended; a trial that is run again after a failure may end a second time."""
        trial = self.trials[trial_id]
        if error or (value is not None and not math.isfinite(value)):
            trial.ending, trial.value = Ending.FAILED, None
        elif value is None:
            trial.ending, trial.value = Ending.UNKNOWN, None
        else:
            trial.ending, trial.value = Ending.SCORED, value

    def rounds(self, size: float) -> int:
        """Return how often every point of a space of `size` points has been suggested already."""
        counts = +self.counts
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
        history = cls(drawn=state["drawn"])
        for entry in state["trials"]:
            history.add(Trial.from_json(entry))
        history.earlier = [Trial.from_json(entry) for entry in state.get("earlier", ())]
        return history


def as_number(value: Any) -> float | None:
    """Return a metric as a float; None if it is not a number (a string, a list, None).

    An integer that is too large for a float is infinite.
    """
    if value is None or isinstance(value, (str, bytes)):
        return None
    try:
        array = np.asarray(value, dtype=float)
    except (TypeError, ValueError):
        return None
    except OverflowError:
        (only,) = np.asarray(value, dtype=object).ravel()[:1]
        return math.inf if only > 0 else -math.inf
    return float(array.reshape(())) if array.size == 1 else None


def reward(value: Any) -> float | None:
    """Return a value that the user gives as a float; None if it is not a number, as True is not."""
    return None if isinstance(value, (bool, np.bool_)) else as_number(value)


def seed_for(seed: int, history: History, purpose: str) -> int:
    """Return a separate seed for each suggestion and each purpose in it."""
    words = [seed, len(history.trials), *purpose.encode()]
    return int(np.random.SeedSequence(words).generate_state(1)[0])
