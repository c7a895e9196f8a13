"""Reads Tune's JSON into plain data of bounded depth.

The files may come from anywhere. They may be nested so deeply that every later step fails, or have text that
is not valid Unicode: `plain` cuts off or escapes such parts and names them. No pickle is opened.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

DEEPEST = 32
# Replaces a value that Tune could only write as a pickle.
OBJECT = "<object>"
_NEEDS_CARE = re.compile(r"\\u[dD][89a-fA-F]|\d{300}|CLOUDPICKLE_FALLBACK")
_SURROGATE = re.compile("[\ud800-\udfff]")


def parse_object(text: str) -> dict[str, Any]:
    """Parse a JSON object. Raises `ValueError` if it is none, or nested too deeply."""
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        why = "nested too deeply" if isinstance(error, RecursionError) else error
        raise ValueError(f"not readable as JSON ({why})") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def read_object(data: bytes, tell: Callable[[str], object] = lambda what: None) -> dict[str, Any]:
    """Return a JSON object in UTF-8 as plain data, and `tell` what had to be cut off or replaced.

    Raises `ValueError` as `parse_object` does.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("utf-8", "replace")
        tell("text that is not UTF-8")
    value = parse_object(text)
    needs_care = text.count("{") + text.count("[") > DEEPEST or _NEEDS_CARE.search(text)
    return plain(value, tell) if needs_care else value


def plain(value: Any, tell: Callable[[str], object] = lambda what: None, depth: int = 0) -> Any:
    """Return a parsed value with its depth bounded, and `tell` what was left out or escaped.

    >>> plain({"model": {"_type": "CLOUDPICKLE_FALLBACK", "value": "80"}})
    {'model': '<object>'}
    """
    match value:
        case float() | bool() | None:
            return value
        case str():
            if value.isascii() or not _SURROGATE.search(value):
                return value
            tell("text that is not Unicode")
            return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", value)
        case int():
            if value.bit_length() < 1000:
                return value
            what = "a number of more than 300 digits"
        case {"_type": "CLOUDPICKLE_FALLBACK"}:
            return OBJECT
        case dict() if depth < DEEPEST:
            return {plain(key, tell): plain(inner, tell, depth + 1) for key, inner in value.items()}
        case list() if depth < DEEPEST:
            return [plain(inner, tell, depth + 1) for inner in value]
        case _:
            what = f"data nested more than {DEEPEST} deep"
    tell(what)
    return f"<{what}>"


def text_or_none(value: Any) -> str | None:
    """Return the first 300 characters of a text; None for anything else."""
    return value[:300] if isinstance(value, str) else None


def number_or_none(value: Any) -> float | None:
    """Return a number of `plain` data as a float; None for anything else."""
    return float(value) if _is_number(value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def mapping(value: Any) -> dict[str, Any]:
    """Return the value if it is a dictionary, else an empty one."""
    return value if isinstance(value, dict) else {}


_LATEST = 9e9  # Unix time of the year 2255: pandas' timestamps end a little later

# What Tune, or a distributed trial's coordinator, adds to reports: none is a user's metric.
TUNES_OWN = frozenset(
    (
        *("timestamp", "training_iteration", "time_this_iter_s", "time_total_s", "time_since_restore"),
        *("iterations_since_restore", "timesteps_total", "timesteps_since_restore", "episodes_total"),
        *("pid", "world_size", "start_s", "warmup_time", "done", "should_checkpoint"),
    )
)


def iteration_of(report: Mapping[str, Any]) -> int | None:
    """Return the report's training_iteration; None if it is not a whole number.

    >>> iteration_of({"training_iteration": 3}), iteration_of({"training_iteration": "x"})
    (3, None)
    """
    value = report.get("training_iteration")
    is_whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53
    return value if is_whole else None


def seconds(value: Any) -> float | None:
    """Return a duration or a Unix time in seconds; None for what can be neither.

    >>> seconds(1.5), seconds(-1), seconds(float("nan")), seconds("1")
    (1.5, None, None, None)
    """
    return float(value) if _is_number(value) and 0 <= value < _LATEST else None
