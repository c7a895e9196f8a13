"""The Gaussian process's settings under bayesian-optimization's names (its `set_gp_params`)."""

from __future__ import annotations

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

_KNOWN = "alpha, kernel and n_restarts_optimizer"


def model_options(params: Mapping[str, Any], base: ModelOptions | None = None) -> ModelOptions:
    """Return `base` with the options that `params` set.

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
    """Raise `SpaceError` if a user's kernel does not fit the features of `space`."""
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
