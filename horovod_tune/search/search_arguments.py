"""Checks the arguments of `BayesOptSearch`, among them those of Ray's class and `gp_params`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.base import clone
from sklearn.gaussian_process.kernels import Kernel

from horovod_tune.search.gp.fitted_model import ModelOptions
from horovod_tune.search.space.domains import SpaceError
from horovod_tune.search.space.search_space import SearchSpace

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
    """Raise ValueError where one is out of bounds."""
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


_KNOWN = "alpha, kernel and n_restarts_optimizer"


def model_options(params: Mapping[str, Any], base: ModelOptions | None = None) -> ModelOptions:
    """Return the options that `params` ask for, the rest as in `base`.

    Raises `ValueError` for an unknown name or a value out of bounds.
    """
    options = base or ModelOptions()
    for name, value in params.items():
        if name == "alpha":
            if not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
                raise ValueError(f"gp_params['alpha'] must be a positive number, got {value!r}")
            options = replace(options, fixed_noise=float(value))
        elif name == "n_restarts_optimizer":
            if not isinstance(value, int) or not 0 <= value <= 3:
                raise ValueError(f"gp_params['n_restarts_optimizer'] must be 0, 1, 2 or 3, got {value!r}")
            options = replace(options, starts=1 + value)
        elif name == "kernel":
            if value is not None and not isinstance(value, Kernel):
                raise ValueError(
                    "gp_params['kernel'] must be a kernel of sklearn.gaussian_process.kernels, or None for "
                    f"the search's own, got {value!r}"
                )
            options = replace(options, kernel=None if value is None else clone(value))
        else:
            raise ValueError(f"gp_params knows {_KNOWN}, got {name!r}")
    return options


def check_kernel(options: ModelOptions, space: SearchSpace) -> None:
    """Raise `SpaceError` where a kernel of the user's own does not fit the features of `space`."""
    if options.kernel is None or space.dimension == 0:
        return
    features = space.features(space.from_quantiles(np.full((1, space.dimension), 0.5)))
    try:
        options.kernel(features, features)
    except ValueError as error:
        widths = np.bincount(space.feature_groups)
        names = ", ".join(f"'{name}' {w}" for name, w in zip(space.names(), widths, strict=True))
        raise SpaceError(
            f"gp_params['kernel'] does not fit the search space, which has {features.shape[1]} features "
            f"({names}; a choice has one for each category): {error}"
        ) from None
