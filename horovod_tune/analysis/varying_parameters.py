"""The hyperparameters that differ between trials, each with the axis it is drawn on."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_tune.analysis.frames import flatten
from horovod_tune.analysis.printable import text_of
from horovod_tune.analysis.reader.records import Domain

_LOG_SPAN = 100.0  # if the space is not recorded, positive numbers over two decades may get a log axis
_LOG_MEDIAN = 0.25  # … if their median is below this fraction of the largest (evenly spread ones: half)
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+(?=>)")  # <Net object at 0x7f0c4c0b3d90>
_FARTHEST = 1e30
_MANY = 12  # a choice among more numbers than this is drawn as a numeric axis


@dataclass(frozen=True)
class Parameter:
    """One hyperparameter over all trials: `values` has one entry per trial, None if the trial lacks it.

    `kind` is "numeric" or "category"; `categories` are a category's texts, in axis order.
    """

    name: str
    kind: str
    values: tuple[Any, ...]
    log: bool = False
    integer: bool = False
    categories: tuple[str, ...] = ()

    @property
    def positions(self) -> np.ndarray:
        """Each trial's position on the axis, shape (trials,); NaN if the trial lacks the parameter.

        On a logarithmic axis, it is the value's log10; for a category, the index in `categories`.
        """
        if self.kind == "category":
            ranks = {text: float(rank) for rank, text in enumerate(self.categories)}
            return np.array([math.nan if v is None else ranks[text_of(v)] for v in self.values])
        numbers = np.array([math.nan if v is None else float(v) for v in self.values])
        if not self.log:
            # No axis reaches further, and a random forest computes with 32-bit floats.
            return np.where(np.isnan(numbers), math.nan, np.clip(numbers, -_FARTHEST, _FARTHEST))
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(numbers > 0, np.log10(numbers), math.nan)

    def limits(self) -> tuple[float, float]:
        """Return the axis's ends, in the unit of `positions`."""
        if self.kind == "category":
            return -0.5, len(self.categories) - 0.5
        finite = self.positions[np.isfinite(self.positions)]
        low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
        if high - low <= 1e-12 * abs(high):
            apart = 0.5 if abs(high) < 1e3 else abs(high) * 0.05
            low, high = low - apart, high + apart
        return low, high


def find_varying(configs: Sequence[Mapping[str, Any]], domains: Mapping[str, Domain]) -> list[Parameter]:
    """Return the hyperparameters with at least two values, in the configurations' order."""
    flat = [flat_config(config, domains) for config in configs]
    varying = []
    for name in dict.fromkeys(name for config in flat for name in config):
        values = tuple(config.get(name) for config in flat)
        if len({f"{v:.15g}" if isinstance(v, float) else str(v) for v in values}) > 1:
            varying.append(_parameter(name, values, domains.get(name)))
    return varying


def flat_config(config: Mapping[str, Any], searched: Collection[str]) -> dict[str, Any]:
    """Return a configuration by flat names; a list is one value, unless its elements are `searched`."""
    by_name: dict[str, Any] = {}
    for name, value in flatten(config).items():
        inner = dict(enumerate(value)) if isinstance(value, (list, tuple)) else {}
        if any(f"{name}/{place}" in searched for place in inner):
            by_name.update({f"{name}/{place}": element for place, element in inner.items()})
        else:
            by_name[name] = _ADDRESS.sub("", value) if isinstance(value, str) else value
    return {name: "None" if value is None else value for name, value in by_name.items()}


def _parameter(name: str, values: tuple[Any, ...], domain: Domain | None) -> Parameter:
    present = [value for value in values if value is not None]
    numbers = [v for v in present if isinstance(v, (int, float)) and not isinstance(v, bool)]
    distinct = {text_of(value) for value in present}
    chosen = domain is not None and domain.kind == "categorical" and len(distinct) <= _MANY
    if len(numbers) < len(present) or chosen or not numbers:
        return Parameter(name, "category", values, categories=_ordered(present))
    positive = all(math.isfinite(v) and v > 0 for v in numbers)
    if domain is not None and domain.kind in ("float", "integer"):
        log = domain.log and positive
    else:
        wide = positive and max(numbers) / min(numbers) >= _LOG_SPAN
        log = wide and float(np.median(numbers)) < _LOG_MEDIAN * max(numbers)
    whole = all(isinstance(value, int) for value in numbers)
    return Parameter(name, "numeric", values, log=log, integer=whole)


def _ordered(values: Sequence[Any]) -> tuple[str, ...]:
    """Return categories as text: numbers by size, then the rest alphabetically."""

    def key(value: Any) -> tuple[bool, float, str]:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
        return not is_number, float(value) if is_number else 0.0, str(value)

    return tuple(dict.fromkeys(text_of(value) for value in sorted(values, key=key)))
