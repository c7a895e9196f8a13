"""Checks of arguments: each error names the argument, its bound and the value."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import suppress
from numbers import Integral, Real
from typing import Any

from horovod_tune.errors import HorovodTuneError


class HyperparameterError(HorovodTuneError, ValueError):
    """A hyperparameter is out of bounds; the message has the name, the bound and the value."""


def number(
    name: str,
    value: Any,
    *,
    at_least: float = -math.inf,
    more_than: float = -math.inf,
    at_most: float = math.inf,
    less_than: float = math.inf,
    error: type[Exception] = HyperparameterError,
) -> float:
    """Return `value` as a finite float within the bounds that are given, or raise `error`.

    >>> number("momentum", 1.0, at_least=0, less_than=1)
    Traceback (most recent call last):
    horovod_tune.bounds.HyperparameterError: momentum must be at least 0 and less than 1, got 1.0
    """
    found = math.nan
    if isinstance(value, Real) and not isinstance(value, bool):
        with suppress(OverflowError):  # an integer beyond 1e308
            found = float(value)
    if not math.isfinite(found):
        raise error(f"{name} must be a finite number, got {value!r}")
    if not (at_least <= found <= at_most and more_than < found < less_than):
        named = {"at least": at_least, "more than": more_than, "at most": at_most, "less than": less_than}
        bounds = " and ".join(f"{words} {bound:g}" for words, bound in named.items() if math.isfinite(bound))
        raise error(f"{name} must be {bounds}, got {value!r}")
    return found


def count(name: str, value: Any, bound: int = 1, *, error: type[Exception] = HyperparameterError) -> int:
    """Return `value` as an int that is at least `bound`, or raise `error`; NumPy's integers are accepted."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < bound:
        raise error(f"{name} must be an integer of at least {bound}, got {value!r}")
    return int(value)


def flag(name: str, value: Any) -> bool:
    """Return `value` as a bool; 0, 1 and NumPy's bools are accepted."""
    # NumPy's own bool is not an Integral.
    is_flag = isinstance(value, Integral) or type(value).__name__ in ("bool", "bool_")
    if not is_flag or value not in (0, 1):
        raise HyperparameterError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def betas(name: str, values: Any) -> tuple[float, float]:
    """Return Adam's betas: two numbers in [0, 1)."""
    if not isinstance(values, (tuple, list)) or len(values) != 2:
        raise HyperparameterError(f"{name} must be two numbers, got {values!r}")
    first, second = (number(f"{name}[{i}]", each, at_least=0, less_than=1) for i, each in enumerate(values))
    return first, second


def increasing(name: str, values: Any) -> tuple[float, ...]:
    """Return numbers of at least 0 that increase."""
    try:
        listed = tuple(values)
    except TypeError:
        raise HyperparameterError(f"{name} must be a list of numbers, got {values!r}") from None
    numbers = tuple(number(f"{name}[{index}]", each, at_least=0) for index, each in enumerate(listed))
    if list(numbers) != sorted(set(numbers)):
        raise HyperparameterError(f"{name} must increase, got {values!r}")
    return numbers


def one_of(name: str, value: Any, choices: Iterable[str]) -> str:
    """Return `value`, one of `choices`."""
    known = sorted(choices)
    if not isinstance(value, str) or value not in known:
        raise HyperparameterError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    return str(value)
