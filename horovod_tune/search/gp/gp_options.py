"""The Gaussian process's settings under bayesian-optimization's names (its `set_gp_params`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from horovod_tune.search.gp.fitted_model import ModelOptions


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
        else:
            raise ValueError(f"gp_params knows alpha and n_restarts_optimizer, got {name!r}")
    return options
