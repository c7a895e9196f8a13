"""The fields that Tune adds to every report, read with care: a training function may overwrite each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_LATEST = 9e9  # Unix time of the year 2255: pandas' clocks end a little later

TUNES_OWN = frozenset(
    {
        "timestamp",
        "training_iteration",
        "time_this_iter_s",
        "time_total_s",
        "pid",
        "time_since_restore",
        "iterations_since_restore",
        "world_size",
        "start_s",
        "timesteps_total",
        "timesteps_since_restore",
        "episodes_total",
        "warmup_time",
    }
)
"""The numbers that Tune, or a distributed trial's coordinator, adds: none is what a search is about."""


def iteration_of(report: Mapping[str, Any]) -> int | None:
    """The report's training_iteration; None if it is not a whole number.

    >>> iteration_of({"training_iteration": 3}), iteration_of({"training_iteration": "x"})
    (3, None)
    """
    value = report.get("training_iteration")
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
        return value
    return None


def seconds(value: Any) -> float | None:
    """A length of time or a Unix time in seconds; None for what can be neither.

    >>> seconds(1.5), seconds(-1), seconds(float("nan")), seconds("1")
    (1.5, None, None, None)
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return None
    return float(value) if math.isfinite(value) and 0 <= value < _LATEST else None
