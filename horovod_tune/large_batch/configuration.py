"""Checks the configuration of `from_config`, and makes the optimiser and schedule that it names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch

from horovod_tune.large_batch import bounds, curves
from horovod_tune.large_batch.lamb import Lamb
from horovod_tune.large_batch.lars import Lars
from horovod_tune.large_batch.layer_wise import parameter_groups
from horovod_tune.large_batch.lr_scheduler import RULE_OF_OPTIMIZER, RULES

# The rates that `relative_lr` multiplies, for batches of dozens to hundreds of samples: SGD as in Goyal et
# al. (2017), AdamW as in torch. The rate of LAMB, and that of LARS times `trust`, is about the fraction by
# which a layer's weights change per step.
USUAL_RATE = {"sgd": 0.1, "lars": 0.1, "adamw": 1e-3, "lamb": 5e-3}

SCHEDULES = ("constant", "multi_step", "polynomial", "cosine", "one_cycle", "inverse_sqrt")

_REQUIRED = {"epochs", "base_batch_size"}
_OPTIONAL: dict[str, Any] = {
    "global_batch_size": None,
    "local_batch_size": None,
    "lr": None,
    "relative_lr": None,
    "scaling": None,
    "optimizer": "sgd",
    "momentum": 0.9,
    "nesterov": False,
    "weight_decay": 0.0,
    # With the paper's 0.001, layers move only at rates of 5 and more. Biases and normalisation train at the
    # full rate, so networks without normalisation would diverge.
    "trust": 0.05,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "schedule": "cosine",
    "warmup_epochs": 0,
    "warmup_start": None,
    "milestones": None,
    "gamma": 0.1,
    "power": 2.0,
    "max_norm": None,
    "max_micro_batch_size": None,
}
_KNOWN = _REQUIRED | set(_OPTIONAL)
# A configuration has exactly one of each pair.
_ONE_OF = (("lr", "relative_lr"), ("global_batch_size", "local_batch_size"))

# Other libraries' names for these keys; always an error, since one could contradict the right key.
_OTHER_NAMES = {"learning_rate": "lr", "epoch": "epochs", "num_epochs": "epochs"}
_OTHER_NAMES |= {"warmup": "warmup_epochs", "wd": "weight_decay", "rule": "scaling"}


def likely_key(key: str, missing: Set[str]) -> str | None:
    """Return the configuration key that the unknown ``key`` probably means; None if it is the user's own.

    Args:
        key: A key of a configuration.
        missing: The known keys that the configuration may still have. Only these are compared by spelling.

    >>> [likely_key(key, {"momentum"}) for key in ("momentm", "LR", "learning_rate", "epochs_2")]
    ['momentum', 'lr', 'lr', None]
    """
    name = key.lower()
    if name in _KNOWN:
        return name
    if name in _OTHER_NAMES:
        return _OTHER_NAMES[name]
    return next(iter(difflib.get_close_matches(name, missing, n=1, cutoff=0.88)), None)


def checked_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with defaults, after checking the values that nothing else checks."""
    if not isinstance(config, Mapping):
        raise bounds.HyperparameterError(f"config must be a dict, got {config!r:.200}")
    missing = _KNOWN - set(config)
    for one, other in (*_ONE_OF, *(pair[::-1] for pair in _ONE_OF)):
        if config.get(other) is not None:
            missing -= {one}
    for key in set(config) - _KNOWN:
        meant = likely_key(str(key), missing)
        if meant is not None:
            raise bounds.HyperparameterError(f"config has no key {key!r}, did you mean {meant!r}?")
    required = sorted(_REQUIRED - set(config))
    if required:
        raise bounds.HyperparameterError(f"config must have {', '.join(required)}, got {sorted(config)}")
    values = {**_OPTIONAL, **{key: config[key] for key in _KNOWN & set(config)}}
    bounds.one_of("optimizer", values["optimizer"], USUAL_RATE)
    bounds.one_of("schedule", values["schedule"], SCHEDULES)
    for one, other in _ONE_OF:
        if (values[one] is None) == (values[other] is None):
            got = f"{one}={values[one]} and {other}={values[other]}"
            raise bounds.HyperparameterError(f"config must have exactly one of {one} and {other}, got {got}")
    if values["local_batch_size"] is not None:
        values["local_batch_size"] = bounds.count("local_batch_size", values["local_batch_size"])
    if values["lr"] is None:
        bounds.number("relative_lr", values["relative_lr"], more_than=0)
        values["lr"] = values["relative_lr"] * USUAL_RATE[values["optimizer"]]
    # Python's own numbers, since torch.load(weights_only=True) refuses a checkpoint with NumPy's.
    values["lr"] = bounds.number("lr", values["lr"], more_than=0)
    for name in ("weight_decay", "trust", "eps"):
        values[name] = bounds.number(name, values[name], at_least=0)
    values["momentum"] = bounds.number("momentum", values["momentum"], at_least=0, less_than=1)
    bounds.number("epochs", values["epochs"], more_than=0)
    bounds.number("warmup_epochs", values["warmup_epochs"], at_least=0)
    if values["warmup_epochs"] >= values["epochs"]:
        bound = f"less than epochs ({values['epochs']:g})"
        raise bounds.HyperparameterError(f"warmup_epochs must be {bound}, got {values['warmup_epochs']!r}")
    if values["scaling"] is None:
        values["scaling"] = RULE_OF_OPTIMIZER[values["optimizer"]]
    bounds.one_of("scaling", values["scaling"], RULES)
    values["nesterov"] = bounds.flag("nesterov", values["nesterov"])
    values["betas"] = bounds.betas(values["betas"])
    return values


def optimizer_of(model: torch.nn.Module, values: dict[str, Any]) -> torch.optim.Optimizer:
    """Return the optimiser that a configuration names, for the model's parameters."""
    groups = parameter_groups(model, weight_decay=values["weight_decay"])
    makers: dict[str, tuple[Callable[..., torch.optim.Optimizer], tuple[str, ...]]] = {
        "sgd": (torch.optim.SGD, ("momentum", "nesterov")),
        "lars": (Lars, ("momentum", "nesterov", "trust")),
        "adamw": (torch.optim.AdamW, ("betas", "eps")),
        "lamb": (Lamb, ("betas", "eps")),
    }
    make, options = makers[values["optimizer"]]
    return make(groups, lr=values["lr"], **{name: values[name] for name in options})


def schedule_of(values: dict[str, Any], scale: float, steps: int) -> curves.Schedule:
    """Return warm-up and decay, in epochs."""
    epochs, warmup, kind = float(values["epochs"]), float(values["warmup_epochs"]), values["schedule"]
    start = values["warmup_start"]
    start = (
        min(1.0, 1 / scale) if start is None else bounds.number("warmup_start", start, at_least=0, at_most=1)
    )
    if kind == "one_cycle":
        if warmup == 0:
            return curves.OneCycle(epochs)
        return curves.OneCycle(epochs, rise=warmup / epochs, start=start)
    if kind == "multi_step":
        if values["milestones"] is None:
            raise bounds.HyperparameterError("config must have milestones with multi_step, got None")
        decay = curves.MultiStep(values["milestones"], gamma=values["gamma"])
        return curves.Warmup(warmup, decay, start, overlap=True)
    after: dict[str, Callable[[], curves.Schedule]] = {
        "constant": curves.Constant,
        "polynomial": lambda: curves.Polynomial(epochs - warmup, power=values["power"]),
        "cosine": lambda: curves.Cosine(epochs - warmup),
        "inverse_sqrt": lambda: curves.InverseSqrt(max(warmup, 1 / steps)),
    }
    return curves.Warmup(warmup, after[kind](), start)
