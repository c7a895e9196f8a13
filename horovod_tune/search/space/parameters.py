"""The model's parameters: which values exist, and the coordinate of each.

A `FloatRange` is continuous; a `Grid` is a finite, ordered set of evenly spaced numbers (integers and
quantised values); a `Choice` has the options of a `tune.choice`. Each translates between

* a *value*, which the training function receives,
* a *coordinate*: a float in [0, 1] on the model's scale (the log for log domains); for categories the index
  of the category,
* a *quantile*: a float in [0, 1); uniform ones give the domain's own distribution (but see `FloatRange`).

All array arguments and results are one-dimensional and of equal length.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
from ray.tune.search.sample import Categorical, Domain
from ray.tune.utils.util import SafeFallbackEncoder

from horovod_tune.search.gp.kernels import FloatArray, linear

#: 1e-5 instead of 0 as the lower end suggests powers of ten; beyond the second factor, it counts as 0.
FEWEST_TIMES, MOST_TIMES = 1e3, 1e8


class FloatRange:
    """Every float from `lower` to `upper`, both included, on a linear or a log scale.

    A linear range with ends a factor of `FEWEST_TIMES` to `MOST_TIMES` apart is on a log scale too. Half of
    the draws are uniform, half log-uniform, and the model makes the axis linear again if the results suggest
    it.

    >>> lr = FloatRange(1e-4, 1e-2, log=True)
    >>> round(lr.to_coordinate(1e-3), 6), lr.to_value(1.0)
    (0.5, 0.01)
    >>> FloatRange(1e-4, 1.0).from_quantiles(np.array([0.25, 0.5])).round(2).tolist()
    [0.49, 0.82]
    """

    is_ordered = True
    cardinality = math.inf

    def __init__(self, lower: float, upper: float, log: bool = False) -> None:
        self.lower, self.upper = float(lower), float(upper)
        times = self.upper / self.lower if self.lower > 0 else 0.0
        # 0.3 over 3e-4 is a little less than 1000 in floats.
        spans_powers = not log and FEWEST_TIMES * (1 - 1e-9) <= times <= MOST_TIMES * (1 + 1e-9)
        #: For a linear range on a log scale, the logarithm of the upper end over the lower one; otherwise 0.
        self.powers = math.log(times) if spans_powers else 0.0
        self.log = log or spans_powers
        scale = math.log if self.log else float
        self._low, self._high = scale(self.lower), scale(self.upper)

    def to_value(self, coordinate: float) -> float:
        position = self._low + float(coordinate) * (self._high - self._low)
        value = math.exp(position) if self.log else position
        # Rounding in exp() and in the sum can step over a bound by one bit.
        return min(max(value, self.lower), self.upper)

    def to_coordinate(self, value: Any) -> float:
        position = math.log(value) if self.log else float(value)
        return min(max((position - self._low) / (self._high - self._low), 0.0), 1.0)

    def snap(self, coordinates: FloatArray) -> FloatArray:
        return np.clip(coordinates, 0.0, 1.0)

    def from_quantiles(self, quantiles: FloatArray) -> FloatArray:
        if not self.powers:
            return quantiles
        steps = np.linspace(0.0, 1.0, 1025)
        on_linear = linear(steps, np.full(1, self.powers))
        return np.interp(quantiles, (steps + on_linear) / 2.0, steps)

    def why_invalid(self, value: Any) -> str | None:
        """Return the reason why `value` is not allowed, or None."""
        return _why_outside(value, self.lower, self.upper)

    def describe(self) -> str:
        scale = ", powers" if self.powers else ", log" if self.log else ""
        return f"float[{self.lower!r}, {self.upper!r}{scale}]"


# Up to here, floats represent every integer exactly.
_EXACT = 2**53


class Grid:
    """The numbers `step * k` for the integers k from `first` to `last`, on a linear or a log scale.

    `step` is an int for integer domains, whose values then are ints, and a float for quantised ones,
    whose values follow the step's decimal notation: 3 steps of 0.1 are 0.3.

    >>> Grid(0, 3, 0.1).to_value(1.0)
    0.3
    >>> [Grid(1, 64, 1, log=True).to_value(c) for c in (0.0, 0.5, 1.0)]
    [1, 8, 64]
    """

    is_ordered = True

    def __init__(self, first: int, last: int, step: float = 1, log: bool = False) -> None:
        self.first, self.last, self.step, self.log = int(first), int(last), step, log
        self.cardinality: float = self.last - self.first + 1
        # Beyond `_EXACT`, floats cannot distinguish neighbours, so a narrow grid is counted from its first
        # value; over so narrow a range a log scale is nearly linear.
        is_far = max(abs(self.first), abs(self.last)) > _EXACT and self.cardinality < _EXACT
        self._base = self.first if is_far and (not log or self.cardinality < self.first * 1e-6) else 0
        self._in_log = log and not self._base
        self._k_low, self._k_high = self.first - self._base, self.last - self._base
        scale = math.log if self._in_log else float
        self._low, self._high = scale(self._k_low), scale(self._k_high)
        # Half a step beyond either end, so that the end values are as likely as the others.
        self._draw_low, self._draw_high = scale(self._k_low - 0.5), scale(self._k_high + 0.5)

    def _value(self, k: int) -> Any:
        if isinstance(self.step, int):
            return self.step * k
        return float(Decimal(repr(float(self.step))) * k)

    def _index(self, positions: FloatArray) -> FloatArray:
        k = np.rint(np.exp(positions) if self._in_log else positions)
        return np.clip(k, self._k_low, self._k_high)

    def _nearest(self, coordinates: FloatArray) -> FloatArray:
        return self._index(self._low + coordinates * (self._high - self._low))

    def every_coordinate(self) -> FloatArray:
        return self._coordinate(np.arange(self._k_low, self._k_high + 1, dtype=float))

    def _coordinate(self, k: FloatArray) -> FloatArray:
        position = np.log(k) if self._in_log else k
        return (position - self._low) / (self._high - self._low)

    def to_value(self, coordinate: float) -> Any:
        # Above 2**53, a float can round past an integer bound.
        k = self._base + int(self._nearest(np.asarray(coordinate)))
        return self._value(min(max(k, self.first), self.last))

    def to_coordinate(self, value: Any) -> float:
        is_whole = isinstance(self.step, int) and isinstance(value, int)
        k = (value // self.step if is_whole else round(value / self.step)) - self._base
        return float(self._coordinate(np.asarray(k, dtype=float)))

    def snap(self, coordinates: FloatArray) -> FloatArray:
        return self._coordinate(self._nearest(coordinates))

    def from_quantiles(self, quantiles: FloatArray) -> FloatArray:
        positions = self._draw_low + quantiles * (self._draw_high - self._draw_low)
        return self._coordinate(self._index(positions))

    def neighbours(self, coordinate: float) -> FloatArray:
        """Return coordinates for steps of a local search: all others; in a large grid, those 2**k away."""
        here = self._nearest(np.asarray(coordinate))
        if self.cardinality <= 24:
            k = np.arange(self._k_low, self._k_high + 1, dtype=float)
        else:
            strides = 2.0 ** np.arange(0, int(math.log2(self.cardinality)))
            k = np.clip(np.concatenate([here - strides, here + strides]), self._k_low, self._k_high)
        return self._coordinate(np.unique(k[k != here]))

    def why_invalid(self, value: Any) -> str | None:
        problem = _why_outside(value, self._value(self.first), self._value(self.last))
        if problem is None and not math.isclose(value / self.step, round(value / self.step), abs_tol=1e-9):
            return f"must be a multiple of {self.step}, got {value!r}"
        return problem

    def describe(self) -> str:
        return f"grid[{self.first}..{self.last} x {self.step!r}{', log' if self.log else ''}]"


def _why_outside(value: Any, low: float, high: float) -> str | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return f"must be a number, got {value!r}"
    return None if low <= value <= high else f"must be in [{low}, {high}], got {value!r}"


class Choice:
    """A choice among values of any kind, which need not be hashable; a repeated value is drawn more often.

    Three or more different numbers have an order: their coordinates are spaced like the values or like their
    logarithms, whichever are more even, or equally if both are uneven. Others are categories.

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
                index = len(self._values)
                if _is_plain(value):
                    self._places[type(value), value] = index
                self._values.append(value)
                counts.append(0)
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
        for index, each in enumerate(self._values):
            if type(each) is type(value) and (each is value or equal(each, value)):
                return index
        if strict:
            return None
        alike = [index for index, each in enumerate(self._values) if equal(each, value)]
        alike = alike[:1] or self._written_like(value)
        return alike[0] if len(alike) == 1 else None

    def _written_like(self, value: Any) -> list[int]:
        """Return the values that are `value`, as far as an experiment's files can tell."""
        return [index for index, each in enumerate(self._values) if equal_as_written(each, value)]

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
        if self._find(value) is not None:
            return None
        if alike := self._written_like(value):
            options = readable([self._values[index] for index in alike])
            return f"must be one of the choice's own values: {value!r} stands for each of {options}"
        return f"must be one of {readable(self._given)}, got {value!r}"

    def describe(self) -> str:
        # The choice among the same functions is the same in another process.
        return _ADDRESS.sub("", f"choice{self._given!r}")


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


# Differs from process to process: <function relu at 0x7f0c4c0b3d90>.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def as_written(value: Any) -> str:
    """Return a value as Tune writes it to an experiment's files, without addresses.

    >>> as_written({1: (2, 3), "norm": math.nan}), as_written(np.array([1, 2]))
    ('{"1": [2, 3], "norm": NaN}', '[1, 2]')
    """
    try:
        text = json.dumps(json.loads(json.dumps(value, cls=SafeFallbackEncoder)), sort_keys=True)
    except (TypeError, ValueError, RecursionError):  # Tune cannot write it
        text = repr(value)
    return _ADDRESS.sub("", text)


def equal_as_written(own: Any, read: Any) -> bool:
    """Return True if two values of any type are equal, or the second may be the first as it was stored.

    In a table that `horovod-tune export` wrote, a list is text.
    """
    if type(own) is type(read) and equal(own, read):
        return True
    text = as_written(own)
    return text == as_written(read) or (isinstance(read, str) and text == read)


def equal(left: Any, right: Any) -> bool:
    """Return True if two values of any type are equal."""
    try:
        return bool(left == right)
    except Exception:  # whatever a user's type raises; arrays and tensors compare elementwise
        return bool(np.array_equal(np.asarray(left), np.asarray(right)))


class _Readable(reprlib.Repr):
    """Shows domains by their bounds, and only the first of many options."""

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
    shown = _Readable()
    shown.maxlist = shown.maxtuple = shown.maxdict = 10
    shown.maxstring = shown.maxother = 200
    return shown.repr(list(options))


Parameter = FloatRange | Grid | Choice
