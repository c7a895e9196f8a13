"""The model's parameters whose values are the options of a `tune.choice`.

Values, coordinates and quantiles are those of `dimensions`.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from ray.tune.search.sample import Categorical, Domain

from horovod_tune.search.space.dimensions import FloatArray, FloatRange, Grid


class Choice:
    """A choice among values of any kind, which need not be hashable; a repeated value is drawn more often.

    Three or more different numbers have an order: their coordinates are spaced like the values or like their
    logarithms, whichever are more even, or equally if both are uneven. Other values, and all values with
    `ordered=False`, are categories, whose coordinates are their indices.

    >>> act = Choice(["relu", None, {"leak": 0.1}])
    >>> act.to_coordinate({"leak": 0.1}), act.to_value(1.0)
    (2.0, None)
    >>> sizes = Choice([64, 16, 32])
    >>> [round(sizes.to_coordinate(size), 3) for size in (16, 32, 64)]
    [0.0, 0.5, 1.0]
    >>> [round(Choice([0.0, 1e-4, 1e-3, 1e-2]).to_coordinate(v), 3) for v in (0.0, 1e-4)]
    [0.0, 0.333]
    """

    def __init__(self, values: Sequence[Any], ordered: bool = True) -> None:
        self.is_ordered = ordered and _are_numbers(values)
        self._given = sorted(values) if self.is_ordered else list(values)
        self._values: list[Any] = []
        # Positions of the plain values: a linear search takes long if there are many.
        self._places: dict[tuple[type, Any], int] = {}
        counts: list[int] = []
        for value in self._given:
            index = self._find(value, strict=True)
            if index is None:
                if _is_plain(value):
                    self._places[type(value), value] = len(self._values)
                self._values.append(value)
                counts.append(1)
            else:
                counts[index] += 1
        self.cardinality: float = len(self._values)
        self._shares = np.cumsum(counts) / sum(counts)
        scale = np.arange(len(self._values), dtype=float)
        if self.is_ordered:
            numbers = np.asarray(self._values, dtype=float)
            scales = [numbers, np.log(numbers)] if numbers[0] > 0 else [numbers]
            even = min(scales, key=_unevenness)
            scale = even if _unevenness(even) <= 1.0 else scale
            scale = (scale - scale[0]) / (scale[-1] - scale[0])
        self._coordinates = scale

    def _find(self, value: Any, strict: bool = False) -> int | None:
        if _is_plain(value):
            place = self._places.get((type(value), value))
            if place is not None or strict:
                return place
        # Type first: 1, 1.0 and True are equal in Python and may all be among the values.
        for same_type in (True,) if strict else (True, False):
            wanted = value if same_type else _listed(value)
            for index, candidate in enumerate(self._values):
                if same_type and type(candidate) is not type(value):
                    continue
                if candidate is value or equal(candidate if same_type else _listed(candidate), wanted):
                    return index
        return None

    def _nearest(self, coordinates: float | FloatArray) -> Any:
        return np.abs(np.asarray(coordinates)[..., None] - self._coordinates).argmin(axis=-1)

    def to_value(self, coordinate: float) -> Any:
        return self._values[self._nearest(coordinate)]

    def to_coordinate(self, value: Any) -> float:
        index = self._find(value)
        assert index is not None, f"{value!r} is not one of {self._values!r}"
        return float(self._coordinates[index])

    def snap(self, coordinates: FloatArray) -> FloatArray:
        return self._coordinates[self._nearest(coordinates)]

    def from_quantiles(self, quantiles: FloatArray) -> FloatArray:
        drawn = np.searchsorted(self._shares, quantiles, side="right")
        return self._coordinates[np.minimum(drawn, len(self._values) - 1)]

    def neighbours(self, coordinate: float) -> FloatArray:
        return np.delete(self._coordinates, self._nearest(coordinate))

    def every_coordinate(self) -> FloatArray:
        return self._coordinates

    def why_invalid(self, value: Any) -> str | None:
        """Return the reason why `value` is not allowed, or None."""
        if self._find(value) is not None:
            return None
        return f"must be one of {readable(self._given)}, got {value!r}"

    def describe(self) -> str:
        # Addresses differ from process to process; the choice among the same functions is the same.
        return re.sub(r" at 0x[0-9a-fA-F]+", "", f"choice{self._given!r}")


def _are_numbers(values: Sequence[Any]) -> bool:
    """Return True if `values` are at least three different finite numbers, without True and False."""
    kinds = (int, float, np.integer, np.floating)
    if any(isinstance(v, bool) or not isinstance(v, kinds) or not np.isfinite(float(v)) for v in values):
        return False
    different = {float(v) for v in values}
    return len(different) >= 3 and len(different) == len({(type(v), v) for v in values})


def _unevenness(scale: FloatArray) -> float:
    """Return the coefficient of variation of the gaps between sorted numbers."""
    gaps = np.diff(scale)
    return float(np.std(gaps) / np.mean(gaps))


def _is_plain(value: Any) -> bool:
    """Return True if a value can be looked up by its type and hash."""
    return type(value) in (bool, int, str, bytes) or (type(value) is float and value == value)


def _listed(value: Any) -> Any:
    """Return a value with lists instead of tuples, as they are read from an experiment's files."""
    if isinstance(value, dict):
        return {key: _listed(inner) for key, inner in value.items()}
    return list(map(_listed, value)) if isinstance(value, (list, tuple)) else value


def equal(left: Any, right: Any) -> bool:
    """Return True if two values of any type are equal."""
    try:
        return bool(left == right)
    except Exception:  # whatever a user's type raises; arrays and tensors compare elementwise
        return bool(np.array_equal(np.asarray(left), np.asarray(right)))


class _Readable(reprlib.Repr):
    """Shows domains by their bounds, and only the first of many options."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = 10
        self.maxstring = self.maxother = 200

    def repr_Float(self, domain: Domain, level: int) -> str:
        return f"{type(domain).__name__}{domain.domain_str}"

    repr_Integer = repr_Float

    def repr_Categorical(self, domain: Categorical, level: int) -> str:
        return f"Categorical{self.repr1(list(domain.categories), level)}"


def readable(options: Sequence[Any]) -> str:
    """Return options for a message.

    >>> from ray import tune
    >>> readable([{"lr": tune.uniform(0, 1)}, "none"])
    "[{'lr': Float(0, 1)}, 'none']"
    >>> readable(range(100, 200))
    '[100, 101, 102, 103, 104, 105, 106, 107, 108, 109, ...]'
    """
    return _Readable().repr(list(options))


Parameter = FloatRange | Grid | Choice
