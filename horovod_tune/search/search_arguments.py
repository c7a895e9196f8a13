"""Reads the arguments of `BayesOptSearch`, including those that only Ray's own class has."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from bayes_opt.acquisition import (
    AcquisitionFunction,
    ConstantLiar,
    ExpectedImprovement,
    GPHedge,
    ProbabilityOfImprovement,
    UpperConfidenceBound,
)

from horovod_tune.search.gp.acquisition import LogExpectedImprovement
from horovod_tune.search.gp.fitted_model import ModelOptions

logger = logging.getLogger("horovod_tune.search.bayesopt")

# Arguments of Ray's class that have no meaning here: Ray's default, and what replaces them.
_REMOVED = {
    "patience": (5, "no point is suggested twice before the space is exhausted, so it is not needed"),
    "skip_duplicate": (True, "no point is suggested twice before the space is exhausted"),
    "repeat_float_precision": (5, "points are compared by the exact values that the function receives"),
    "verbose": (0, "set the level of the logger 'horovod_tune.search' instead"),
}


def refuse_removed(given: Mapping[str, Any]) -> None:
    """Warn of each removed argument that has Ray's default value.

    Raises:
        TypeError: An argument has another value, or is unknown to Ray's class as well.
    """
    for name, value in given.items():
        if name not in _REMOVED:
            raise TypeError(f"BayesOptSearch has no argument {name!r}")
        default, instead = _REMOVED[name]
        if value != default:
            raise TypeError(f"{name} is gone from BayesOptSearch: {instead}. Leave it out")
        logger.warning("%s is ignored: %s", name, instead)


def check_arguments(random_search_steps: Any, time_attr: Any, max_t: Any) -> None:
    """Raise ValueError if an argument is of the wrong type or out of bounds."""
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


def check_metrics(metric: str | Sequence[str] | None, mode: str | Sequence[str] | None) -> None:
    """Raise `ValueError` if metric or mode is invalid, or they do not match."""
    if metric is None or isinstance(metric, str):
        if mode not in (None, "min", "max"):
            raise ValueError(f"mode must be 'min' or 'max', got {mode!r}")
        return
    if len(metric) < 2 or len(set(metric)) < len(metric) or not all(isinstance(name, str) for name in metric):
        raise ValueError(f"metric must be a name, or a list of at least two different names, got {metric!r}")
    if mode is None or isinstance(mode, str) or len(mode) != len(metric) or set(mode) - {"min", "max"}:
        raise ValueError(
            f"mode must have 'min' or 'max' for each of the metrics {list(metric)}, got {mode!r}"
        )


def seed_of(random_state: Any) -> int:
    """Return the seed of a `random_state`; None gives a new one each time.

    Raises `ValueError` for anything but an integer of 0 or more, a NumPy generator or None.
    """
    if random_state is None:
        return int(np.random.SeedSequence().generate_state(1)[0])
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**32))
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31))
    if (
        isinstance(random_state, (int, np.integer))
        and not isinstance(random_state, bool)
        and random_state >= 0
    ):
        return int(random_state)
    raise ValueError(
        f"random_state must be an integer of 0 or more, a NumPy generator or None, got {random_state!r}"
    )


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
            raise ValueError(f"gp_params accepts alpha and n_restarts_optimizer, got {name!r}")
    return options


def acquisition_of(
    acquisition_function: AcquisitionFunction | None, utility_kwargs: dict | None
) -> AcquisitionFunction:
    """Return the acquisition function to use.

    `utility_kwargs` is the argument of Ray's BayesOptSearch: `kind` (ucb, ei or poi), `kappa`, `xi`,
    `kappa_decay`, `kappa_decay_delay`.

    Raises:
        ValueError: Both arguments are given, or a kind or a key is unknown.
        TypeError: The object cannot be used here.
    """
    if utility_kwargs is not None:
        if acquisition_function is not None:
            raise ValueError("give acquisition_function or utility_kwargs, not both")
        return _from_utility(dict(utility_kwargs))
    if acquisition_function is None:
        return LogExpectedImprovement()
    if isinstance(acquisition_function, ConstantLiar):
        raise TypeError(
            "acquisition_function cannot be a ConstantLiar: the model draws results of running trials. "
            "Pass only its base_acquisition"
        )
    if isinstance(acquisition_function, GPHedge):
        raise TypeError("acquisition_function cannot be a GPHedge; give one of its functions")
    if not isinstance(acquisition_function, AcquisitionFunction):
        raise TypeError(
            "acquisition_function must be one of bayes_opt.acquisition's UpperConfidenceBound, "
            "ExpectedImprovement, ProbabilityOfImprovement, or an AcquisitionFunction with "
            f"base_acq(mean, std); got {acquisition_function!r}"
        )
    return acquisition_function


def _from_utility(kwargs: dict) -> AcquisitionFunction:
    kind = kwargs.pop("kind", "ucb")
    kappa, xi = kwargs.pop("kappa", 2.576), kwargs.pop("xi", 0.0)
    decay = {
        "exploration_decay": kwargs.pop("kappa_decay", None),
        "exploration_decay_delay": kwargs.pop("kappa_decay_delay", None),
    }
    if kwargs:
        raise ValueError(
            "utility_kwargs accepts kind, kappa, xi, kappa_decay and kappa_decay_delay; "
            f"also got {sorted(kwargs)}"
        )
    kinds = {
        "ucb": lambda: UpperConfidenceBound(kappa=kappa, **decay),
        "ei": lambda: ExpectedImprovement(xi=xi, **decay),
        "poi": lambda: ProbabilityOfImprovement(xi=xi, **decay),
    }
    if kind not in kinds:
        raise ValueError(f"utility_kwargs['kind'] must be 'ucb', 'ei' or 'poi', got {kind!r}")
    return kinds[kind]()
