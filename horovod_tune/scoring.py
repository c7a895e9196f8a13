"""Compares reports by one metric or several, within limits: pure functions."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


def check_metric_name(argument: str, name: Any) -> None:
    """Raise `ValueError` if `name` cannot be the name of a metric."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"{argument} must be the name of a reported value, got {name!r}")


def check_metric(metric: Any, mode: Any) -> None:
    """Raise `ValueError` unless each is None, or the name of a metric and "min" or "max"."""
    if metric is not None:
        check_metric_name("metric", metric)
    if mode not in (None, "min", "max"):
        raise ValueError(f'mode must be "min" or "max", got {mode!r}')


def value_of(row: Mapping[str, Any], metric: str) -> float | None:
    """Return a report's metric as a float; None if it is missing or not a number.

    >>> value_of({"valid": {"loss": 2}}, "valid/loss")
    2.0
    """
    return as_number(nested_value(row, metric))


def as_number(value: Any) -> float | None:
    """Return a metric as a float; None if it is not a number (a string, a list, None).

    An integer that is too large for a float is infinite.
    """
    if value is None or isinstance(value, (str, bytes)):
        return None
    try:
        if isinstance(value, (int, float)):
            return float(value)
        # `item`: a tensor that requires a gradient, or is on a GPU, does not become an array.
        array = np.asarray(value.item() if hasattr(value, "item") else value, dtype=float)
    except (TypeError, ValueError, RuntimeError):
        return None
    except OverflowError:
        (only,) = np.asarray(value, dtype=object).ravel()[:1]
        return math.inf if only > 0 else -math.inf
    return float(array.reshape(())) if array.size == 1 else None


def nested_value(values: Mapping[str, Any], name: str) -> Any:
    """Return a value by its name, where `/` leads into nested dictionaries; None if the value is missing.

    >>> nested_value({"valid": {"top/1": 2}}, "valid/top/1")
    2
    """
    value, slash = values.get(name), name.find("/")
    while value is None and slash >= 0:
        inner = values.get(name[:slash])
        if isinstance(inner, Mapping):
            value = nested_value(inner, name[slash + 1 :])
        slash = name.find("/", slash + 1)
    return value


_SENSES = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
_LIMIT = re.compile(r"\s*(?P<metric>[^<>=]+?)\s*(?P<sense><=|>=|<|>)\s*(?P<bound>[^<>=]+?)\s*")


@dataclass(frozen=True)
class Limit:
    """A bound on one metric; `sense` is "<=", ">=", "<" or ">"."""

    metric: str
    sense: str
    bound: float

    def __str__(self) -> str:
        return f"{self.metric} {self.sense} {str(self.bound).removesuffix('.0')}"

    def kept_by(self, value: float | None) -> bool:
        """Return True if a value meets the limit; one that is not known, or NaN, does not."""
        return value is not None and bool(_SENSES[self.sense](value, self.bound))


def parse_limit(text: str) -> Limit:
    """Parse a limit. Raises `ValueError` if it is not one metric and one finite bound.

    >>> parse_limit("latency_ms <= 20")
    Limit(metric='latency_ms', sense='<=', bound=20.0)
    """
    match = _LIMIT.fullmatch(text) if isinstance(text, str) else None
    try:
        bound = float(match["bound"]) if match else math.nan
    except ValueError:
        bound = math.nan
    if match is None or not math.isfinite(bound):
        example = '"latency_ms <= 20", with one metric and a finite bound'
        raise ValueError(f"a limit is written like {example}, got {text!r}")
    return Limit(match["metric"], match["sense"], bound)


def known_values(
    rows: Sequence[Mapping[str, Any]], metrics: Sequence[str]
) -> Iterator[tuple[float | None, ...]]:
    """Yield for each report every metric's last value up to it; a report may lack some metrics.

    >>> list(known_values([{"a": 1}, {"b": 5}, {"a": 2}], ["a", "b"]))
    [(1.0, None), (1.0, 5.0), (2.0, 5.0)]
    """
    latest: dict[str, float | None] = dict.fromkeys(metrics)
    for row in rows:
        latest |= {name: value for name in latest if (value := value_of(row, name)) is not None}
        yield tuple(latest[name] for name in metrics)


def kept(rows: Sequence[Mapping[str, Any]], limits: Sequence[Limit]) -> list[bool]:
    """Return, for each report, True if it meets all limits."""
    values = known_values(rows, [limit.metric for limit in limits])
    return [all(map(Limit.kept_by, limits, at)) for at in values]


def non_dominated(values: np.ndarray, modes: Sequence[str]) -> np.ndarray:
    """Return a mask, shape (points,): True for the rows of `values`, shape (points, metrics), on the front.

    A row is on the front if all its values are finite and no other row dominates it. A row dominates another
    if it is at least as good in every metric and better in one.

    >>> non_dominated(np.array([[1.0, 5.0], [2.0, 4.0], [2.0, 6.0]]), ["min", "min"]).tolist()
    [True, True, False]
    """
    costs = _as_costs(values, modes)
    front = np.isfinite(costs).all(axis=1)
    order = np.flatnonzero(front)
    order = order[np.lexsort(costs[order].T[::-1])]  # only earlier rows can dominate a row
    members: list[int] = []
    for index in order:
        others = costs[members]
        no_worse = (others <= costs[index]).all(axis=1)
        if (no_worse & (others < costs[index]).any(axis=1)).any():
            front[index] = False
        else:
            members.append(int(index))
    return front


def hypervolume(values: np.ndarray, reference: Sequence[float], modes: Sequence[str]) -> float:
    r"""Return the volume that points dominate up to a reference point (Zitzler and Thiele, 1998).

    With maximised metrics negated, it is :math:`\lambda(\bigcup_i [v_i, r])`, the measure of the union of the
    boxes from each point to the reference. It is computed exactly, by slicing along the last metric; meant
    for a few hundred points and up to five metrics.

    >>> hypervolume(np.array([[1.0, 2.0], [2.0, 1.0]]), [3.0, 3.0], ["min", "min"])
    3.0
    """
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
    return values * np.array([1.0 if mode == "min" else -1.0 for mode in modes])
