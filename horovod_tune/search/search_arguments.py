"""Checks the arguments of `BayesOptSearch`, including those that only Ray's own class has."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

logger = logging.getLogger("horovod_tune.search.bayesopt")

# Arguments of Ray's class that have no meaning here: Ray's default, and what replaces them.
_REMOVED = {
    "patience": (5, "no point is suggested twice before the space is exhausted, so nothing is waited for"),
    "skip_duplicate": (True, "no point is suggested twice before the space is exhausted"),
    "repeat_float_precision": (5, "points are compared by the exact values that the function receives"),
    "verbose": (0, "set the level of the logger 'horovod_tune.search' instead"),
}


def refuse_removed(given: Mapping[str, Any]) -> None:
    """Warn of an argument of Ray's class at its default.

    Raises:
        TypeError: it has another value, or Ray's class has no such argument either.
    """
    for name, value in given.items():
        if name not in _REMOVED:
            raise TypeError(f"BayesOptSearch has no argument {name!r}")
        default, instead = _REMOVED[name]
        if value != default:
            raise TypeError(f"{name} is gone from BayesOptSearch: {instead}. Leave it out")
        logger.warning("%s is ignored: %s", name, instead)


def check_arguments(random_search_steps: Any, time_attr: Any, max_t: Any) -> None:
    """Raise ValueError if one is out of bounds."""
    if time_attr is not None and (not isinstance(time_attr, str) or not time_attr):
        raise ValueError(f"time_attr must be the name of a reported value, got {time_attr!r}")
    is_number = isinstance(max_t, (int, float, np.integer, np.floating)) and not isinstance(max_t, bool)
    if max_t is not None and not (is_number and 0 < max_t < math.inf):
        raise ValueError(f"max_t must be a finite number above 0, got {max_t!r}")
    if random_search_steps is not None and (
        isinstance(random_search_steps, bool)
        or not isinstance(random_search_steps, (int, np.integer))
        or random_search_steps < 0
    ):
        raise ValueError(f"random_search_steps must be an integer of 0 or more, got {random_search_steps!r}")
