"""Which report of a trial, and which trial, is best: pure functions over plain reports."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horovod_tune.analysis.reader.tune_fields import iteration_of

SCOPES = ("last", "all")


@dataclass(frozen=True)
class Score:
    """One trial's values of the metric; NaN and None if it never reported a finite one.

    `best_row` is the index of the best report among the trial's rows; only reports that keep the limits can
    be best. `allowed` is True if the last one keeps them.
    """

    last: float = math.nan
    best: float = math.nan
    best_iteration: int | None = None
    best_row: int | None = None
    allowed: bool = True


def value_of(row: Mapping[str, Any], metric: str) -> float | None:
    """The metric in a report, with `/` reaching into nested results; None if it is not there.

    >>> value_of({"valid": {"loss": 2}}, "valid/loss")
    2.0
    """
    value: Any = row.get(metric)
    if value is None and "/" in metric:
        value = row
        for part in metric.split("/"):
            value = value.get(part) if isinstance(value, Mapping) else None
    if not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:  # an integer beyond 1e308
        return math.inf if value > 0 else -math.inf


def is_better(value: float, other: float, mode: str) -> bool:
    """Return True if a value beats another; NaN and infinities beat nothing, and a tie is no victory.

    >>> is_better(1.0, 1.0, "min"), is_better(float("nan"), 1.0, "min"), is_better(1.0, float("nan"), "max")
    (False, False, True)
    """
    if not math.isfinite(value):
        return False
    if not math.isfinite(other):
        return True
    return value < other if mode == "min" else value > other


def score(
    rows: Sequence[Mapping[str, Any]], metric: str, mode: str, kept: Sequence[bool] | None = None
) -> Score:
    """Return a trial's last and best value of the metric; of equal ones the earlier report's is best.

    `kept` has for each report whether it keeps the limits; all do unless given.
    """
    last, best, best_row = math.nan, math.nan, None
    for index, row in enumerate(rows):
        value = value_of(row, metric)
        if value is None:
            continue
        last = value
        if (kept is None or kept[index]) and is_better(value, best, mode):
            best, best_row = value, index
    iteration = iteration_of(rows[best_row]) if best_row is not None else None
    return Score(last, best, iteration, best_row, allowed=not kept or kept[-1])


def best_index(scores: Sequence[Score], mode: str, scope: str) -> int | None:
    """Return the position of the best of trials in the order of their creation; None if none has a value.

    `scope` is "last" (trials are compared by their last value, as Tune does) or "all" (by their best one).
    """
    winner, winning = None, math.nan
    for index, scored in enumerate(scores):
        value = scored.best
        if scope == "last":
            value = scored.last if scored.allowed else math.nan
        if is_better(value, winning, mode):
            winner, winning = index, value
    return winner
