"""Reads the arguments of `BayesOptSearch`, including those that only Ray's own class has."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from numbers import Integral
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

from horovod_tune import bounds
from horovod_tune.scoring import check_metric_name
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
    """Warn of each removed argument that has Ray's default value; raise `TypeError` for all others."""
    for name, value in given.items():
        if name not in _REMOVED:
            raise TypeError(f"BayesOptSearch has no argument {name!r}")
        default, instead = _REMOVED[name]
        if value != default:
            raise TypeError(f"{name} is gone from BayesOptSearch: {instead}. Leave it out")
        logger.warning("%s is ignored: %s", name, instead)


def check_arguments(random_search_steps: Any, time_attr: Any, max_t: Any) -> None:
    if time_attr is not None:
        check_metric_name("time_attr", time_attr)
    if max_t is not None:
        bounds.number("max_t", max_t, more_than=0)
    if random_search_steps is not None:
        bounds.count("random_search_steps", random_search_steps, 0)


def check_metrics(metric: Any, mode: Any) -> tuple[Any, Any]:
    """Return metric and mode, each None, a string or a list of strings; raise `ValueError` for others.

    Their order matters, so sets and dictionaries are refused.
    """
    if metric is None or isinstance(metric, str):
        if metric is not None:
            check_metric_name("metric", metric)
            metric = str(metric)  # Ray compares the types of the two; a string of NumPy has its own
        return metric, None if mode is None else bounds.one_of("mode", mode, ("min", "max"))
    names = metric if isinstance(metric, (list, tuple)) else ()
    if not all(isinstance(name, str) and name for name in names) or len({*names}) < max(2, len(names)):
        raise ValueError(f"metric must be a name, or a list of at least two different names, got {metric!r}")
    if not isinstance(mode, (list, tuple)) or len(mode) != len(names):
        raise ValueError(
            f"mode must have 'min' or 'max' for each of the metrics {list(metric)}, got {mode!r}"
        )
    modes = [bounds.one_of(f"mode[{i}]", each, ("min", "max")) for i, each in enumerate(mode)]
    return [str(name) for name in names], modes


def seed_of(random_state: Any) -> int:
    """Return the seed of a `random_state`; None gives a new one each time."""
    if random_state is None:
        return int(np.random.SeedSequence().generate_state(1)[0])
    if isinstance(random_state, np.random.Generator):
        return int(random_state.integers(2**32))
    if isinstance(random_state, np.random.RandomState):
        return int(random_state.randint(2**31))
    if isinstance(random_state, bool) or not isinstance(random_state, Integral) or random_state < 0:
        raise ValueError(
            f"random_state must be an integer of 0 or more, a NumPy generator or None, got {random_state!r}"
        )
    return int(random_state)


def model_options(params: Mapping[str, Any], base: ModelOptions | None = None) -> ModelOptions:
    """Return `base` with the options that `params` set."""
    options = base or ModelOptions()
    for name, value in _dictionary("gp_params", params).items():
        if name == "alpha":
            options = replace(options, fixed_noise=bounds.number("gp_params['alpha']", value, more_than=0))
        elif name != "n_restarts_optimizer":
            raise ValueError(f"gp_params accepts alpha and n_restarts_optimizer, got {name!r}")
        elif isinstance(value, bool) or not isinstance(value, Integral) or value not in range(4):
            raise ValueError(f"gp_params['n_restarts_optimizer'] must be 0, 1, 2 or 3, got {value!r}")
        else:
            options = replace(options, starts=1 + int(value))
    return options


def _dictionary(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dictionary, got {value!r}")
    return dict(value)


def acquisition_of(
    acquisition_function: AcquisitionFunction | None, utility_kwargs: Mapping[str, Any] | None
) -> AcquisitionFunction:
    """Return the acquisition function to use; `utility_kwargs` is the argument of Ray's BayesOptSearch."""
    if utility_kwargs is not None:
        if acquisition_function is not None:
            raise ValueError("give acquisition_function or utility_kwargs, not both")
        return _from_utility(_dictionary("utility_kwargs", utility_kwargs))
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


def _from_utility(kwargs: dict[str, Any]) -> AcquisitionFunction:
    kind = kwargs.pop("kind", "ucb")
    # Ray's examples give both of these with any kind, so the one that is not used is no error.
    kappa, xi = kwargs.pop("kappa", 2.576), kwargs.pop("xi", 0.0)
    decay, delay = kwargs.pop("kappa_decay", None), kwargs.pop("kappa_decay_delay", None)
    if kwargs:
        raise ValueError(
            "utility_kwargs accepts kind, kappa, xi, kappa_decay and kappa_decay_delay; "
            f"also got {sorted(kwargs)}"
        )
    bounds.number("utility_kwargs['kappa']", kappa, at_least=0)
    bounds.number("utility_kwargs['xi']", xi, at_least=0)
    if decay is not None:
        bounds.number("utility_kwargs['kappa_decay']", decay, more_than=0, at_most=1)
    if delay is not None:
        delay = bounds.count("utility_kwargs['kappa_decay_delay']", delay, 0)
    kinds = {
        "ucb": UpperConfidenceBound(kappa, decay, delay),
        "ei": ExpectedImprovement(xi, decay, delay),
        "poi": ProbabilityOfImprovement(xi, decay, delay),
    }
    return kinds[bounds.one_of("utility_kwargs['kind']", kind, kinds)]
