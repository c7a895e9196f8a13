"""Limits that a result has to keep (`latency_ms <= 20`): pure functions over plain reports."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horovod_tune.analysis.scoring import value_of

_SENSES: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}
_LIMIT = re.compile(r"\s*(?P<metric>[^<>=]+?)\s*(?P<sense><=|>=|<|>)\s*(?P<bound>[^<>=]+?)\s*")


@dataclass(frozen=True)
class Limit:
    """A bound on one metric; `sense` is "<=", ">=", "<" or ">"."""

    metric: str
    sense: str
    bound: float

    def __str__(self) -> str:
        return f"{self.metric} {self.sense} {self.bound:g}"

    def kept_by(self, value: float | None) -> bool:
        """Return True if a value keeps the limit; one that is not known, or NaN, does not."""
        return value is not None and _SENSES[self.sense](value, self.bound)


def parse_limit(text: str) -> Limit:
    """Read a limit as a person writes it. Raises `ValueError` for anything else.

    >>> parse_limit("latency_ms <= 20")
    Limit(metric='latency_ms', sense='<=', bound=20.0)
    """
    found = _LIMIT.fullmatch(text)
    try:
        bound = float(found["bound"]) if found else math.nan
    except ValueError:
        bound = math.nan
    if found is None or not math.isfinite(bound):
        raise ValueError(
            f'a limit is written like "latency_ms <= 20", with one metric and a finite bound, got {text!r}'
        )
    return Limit(found["metric"], found["sense"], bound)


def known_values(
    rows: Sequence[Mapping[str, Any]], metrics: Sequence[str]
) -> Iterator[tuple[float | None, ...]]:
    """Give, at each report, each metric's value as last reported: some metrics come with some reports only.

    >>> list(known_values([{"a": 1}, {"b": 5}, {"a": 2}], ["a", "b"]))
    [(1.0, None), (1.0, 5.0), (2.0, 5.0)]
    """
    known: list[float | None] = [None] * len(metrics)
    for row in rows:
        for place, metric in enumerate(metrics):
            value = value_of(row, metric)
            if value is not None:
                known[place] = value
        yield tuple(known)


def kept(rows: Sequence[Mapping[str, Any]], limits: Iterable[Limit]) -> list[bool]:
    """Return for each report whether all limits are kept at it."""
    limits = tuple(limits)
    values = known_values(rows, [limit.metric for limit in limits])
    return [all(limit.kept_by(v) for limit, v in zip(limits, at, strict=True)) for at in values]
