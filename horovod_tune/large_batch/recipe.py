"""Runs in each rank: a configuration as optimiser, schedule and accumulation for the world it is in."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from horovod_tune.large_batch import bounds
from horovod_tune.large_batch.accumulation import GradientAccumulator, StepResult
from horovod_tune.large_batch.batches import BatchSplit, rank_passes, split_batch, steps_per_epoch
from horovod_tune.large_batch.lamb import Lamb
from horovod_tune.large_batch.lars import Lars
from horovod_tune.large_batch.layer_groups import parameter_groups
from horovod_tune.large_batch.noise_scale import NoiseScale
from horovod_tune.large_batch.scaling import RULE_OF_OPTIMIZER, scaling_factor
from horovod_tune.large_batch.schedules import curves
from horovod_tune.large_batch.schedules.scheduler import LargeBatchLR
from horovod_tune.large_batch.world import horovod, world_size

# What `relative_lr` is relative to, for batches of some dozens to some hundreds of samples: SGD as in Goyal
# et al. (2017), AdamW as in torch. With LARS (times `trust`) and LAMB it is about the part of its weights
# that a layer moves in a step.
USUAL_RATE = {"sgd": 0.1, "lars": 0.1, "adamw": 1e-3, "lamb": 5e-3}

SCHEDULES = ("constant", "multi_step", "polynomial", "cosine", "restarts", "one_cycle", "inverse_sqrt")

_REQUIRED = {"epochs", "global_batch_size", "base_batch_size"}
_OPTIONAL: dict[str, Any] = {
    "lr": None,
    "relative_lr": None,
    "scaling": None,
    "optimizer": "sgd",
    "momentum": 0.9,
    "nesterov": False,
    "weight_decay": 0.0,
    # Biases and normalisation train at the whole rate: with the paper's 0.001, layers that move at all mean a
    # rate of 5 and more there, which networks without normalisation do not bear.
    "trust": 0.05,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "schedule": "cosine",
    "warmup_epochs": 0,
    "warmup_start": None,
    "milestones": None,
    "gamma": 0.1,
    "power": 2.0,
    "cycle_epochs": None,
    "max_norm": None,
    "max_micro_batch_size": None,
}


@dataclass(frozen=True)
class TrainingSetup:
    """What `from_config` makes; all of it may be used by itself too.

    Attributes:
        optimizer: A ``hvd.DistributedOptimizer`` where there are several ranks.
        scheduler: Its `step()` is called by the accumulator.
        accumulator: Makes an optimiser step out of the passes.
        split: How the world works through a global batch.
        noise_scale: None where there is but one pass a step, on one rank.
    """

    optimizer: torch.optim.Optimizer
    scheduler: LargeBatchLR
    accumulator: GradientAccumulator
    split: BatchSplit
    noise_scale: NoiseScale | None

    def batches(self, order: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Give, for each optimiser step of an epoch, the indices of this rank's passes; see `rank_passes`."""
        hvd = horovod()
        yield from rank_passes(order, self.split, 0 if hvd is None else hvd.rank())

    def backward(self, loss: torch.Tensor, *, samples: int) -> None:
        """Compute the gradients of a pass, whose mean loss this is."""
        self.accumulator.backward(loss, samples=samples)

    def step(self) -> StepResult:
        """Make the optimiser step, and the schedule's."""
        return self.accumulator.step()

    def metrics(self) -> dict[str, float]:
        """Return learning rate and, once it is known, noise scale with its interval, for `report`."""
        found = {"lr": float(self.optimizer.param_groups[0]["lr"])}
        estimate = self.noise_scale.estimate() if self.noise_scale else None
        if estimate is not None:
            found |= {
                "noise_scale": estimate.noise_scale,
                "noise_scale_low": estimate.low,
                "noise_scale_high": estimate.high,
            }
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parts, which ``torch.load(weights_only=True)`` reads."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "noise_scale": None if self.noise_scale is None else self.noise_scale.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict` at the same epoch, with the rates and the batch of this configuration.

        So a trial goes on after population based training has changed its configuration, too.
        """
        fresh = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({**state_dict["optimizer"], "param_groups": fresh})
        batch, steps = self.scheduler.global_batch_size, self.scheduler.steps_per_epoch
        base = self.scheduler.base_batch_size
        self.scheduler.load_state_dict({**state_dict["scheduler"], "base_batch_size": base})
        if (batch, steps) != (self.scheduler.global_batch_size, self.scheduler.steps_per_epoch):
            self.scheduler.change_batch(batch, steps_per_epoch=steps)
        if self.noise_scale is not None and state_dict["noise_scale"] is not None:
            self.noise_scale.load_state_dict(state_dict["noise_scale"])


def from_config(
    model: torch.nn.Module,
    config: Mapping[str, Any],
    *,
    num_samples: int,
    scaler: Any = None,
    **distributed: Any,
) -> TrainingSetup:
    """Return optimiser, schedule and accumulation for a configuration, in the world that this rank is in.

    Call it after ``hvd.init()``; broadcast the model's parameters as always. Read from `config`:

    * ``epochs``, ``global_batch_size``, ``base_batch_size``; and ``lr``, the rate tuned for the base
    batch, or
      ``relative_lr``, the same in units of a usual one of the optimiser (`USUAL_RATE`);
    * ``scaling`` (``linear``, ``sqrt``, ``none``; by default what fits the optimiser),
    ``max_micro_batch_size``; * ``optimizer`` (``sgd``, ``lars``, ``adamw``, ``lamb``), ``momentum`` and
    ``nesterov`` (SGD, LARS), ``trust``
      (LARS), ``betas`` and ``eps`` (AdamW, LAMB), ``weight_decay``, ``max_norm``;
    * ``schedule``: ``constant``, ``multi_step`` (with ``milestones`` in epochs of the training, and
    ``gamma``),
      ``polynomial`` (``power``), ``cosine``, ``restarts`` (``cycle_epochs``), ``one_cycle``,
      ``inverse_sqrt``;
    * ``warmup_epochs``, and ``warmup_start``, a part of the peak rate; by default the base rate, as in
    Goyal et
      al. (2017).

    Other keys are yours and are left alone, unless one looks like a misspelling of these.

    Args:
        model: Its parameters are grouped by `parameter_groups`.
        config: A trial's configuration.
        num_samples: Of the training set, over all ranks.
        scaler: A ``torch.amp.GradScaler``.
        **distributed: For ``hvd.DistributedOptimizer``, such as ``compression``.

    Raises:
        HyperparameterError: A key is missing, misspelt or out of bounds, the world does not divide the batch,
            or the warm-up is longer than the training.

    >>> config = {"lr": 0.1, "epochs": 4, "base_batch_size": 32, "global_batch_size": 128, "warmup_epochs": 1}
    >>> setup = from_config(torch.nn.Linear(2, 1), config, num_samples=1024)
    >>> setup.optimizer.param_groups[0]["lr"], setup.split.passes, setup.scheduler.scale
    (0.1, 1, 4.0)
    """
    values = _values(config)
    world = world_size(distributed.get("process_set"))
    split = split_batch(values["global_batch_size"], world, values["max_micro_batch_size"])
    optimizer: Any = _optimizer(model, values)
    hvd = horovod()
    if hvd is not None and world > 1:
        named = list(model.named_parameters())
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, **distributed)
    steps = steps_per_epoch(num_samples, split.global_batch_size)
    rule = values["scaling"]
    scale = scaling_factor(split.global_batch_size, values["base_batch_size"], rule)
    scheduler = LargeBatchLR(
        optimizer,
        _schedule(values, scale, steps),
        steps_per_epoch=steps,
        global_batch_size=split.global_batch_size,
        base_batch_size=values["base_batch_size"],
        rule=rule,
    )
    noise_scale = NoiseScale() if world * split.passes > 1 else None
    accumulator = GradientAccumulator(
        optimizer,
        passes=split.passes,
        local_batch_size=split.local_batch_size,
        max_norm=values["max_norm"],
        scaler=scaler,
        scheduler=scheduler,
        noise_scale=noise_scale,
    )
    return TrainingSetup(optimizer, scheduler, accumulator, split, noise_scale)


def _values(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that are read, with defaults, checked as far as no part checks them itself."""
    known = _REQUIRED | set(_OPTIONAL)
    for key in set(config) - known:
        similar = difflib.get_close_matches(str(key), known - set(config), n=1, cutoff=0.85)
        if similar:
            raise bounds.HyperparameterError(f"config has no key {key!r}, did you mean {similar[0]!r}?")
    missing = sorted(_REQUIRED - set(config))
    if missing:
        raise bounds.HyperparameterError(f"config must have {', '.join(missing)}, got {sorted(config)}")
    values = {**_OPTIONAL, **{key: config[key] for key in known & set(config)}}
    bounds.one_of("optimizer", values["optimizer"], USUAL_RATE)
    bounds.one_of("schedule", values["schedule"], SCHEDULES)
    if (values["lr"] is None) == (values["relative_lr"] is None):
        raise bounds.HyperparameterError(
            f"config must have one of lr and relative_lr, got lr={values['lr']} and "
            f"relative_lr={values['relative_lr']}"
        )
    if values["lr"] is None:
        bounds.more_than("relative_lr", values["relative_lr"], 0)
        values["lr"] = values["relative_lr"] * USUAL_RATE[values["optimizer"]]
    bounds.more_than("lr", values["lr"], 0)
    bounds.more_than("epochs", values["epochs"], 0)
    bounds.at_least("warmup_epochs", values["warmup_epochs"], 0)
    if values["warmup_epochs"] >= values["epochs"]:
        raise bounds.HyperparameterError(
            f"warmup_epochs must be less than epochs ({values['epochs']:g}), got {values['warmup_epochs']!r}"
        )
    values["scaling"] = values["scaling"] or RULE_OF_OPTIMIZER[values["optimizer"]]
    return values


def _optimizer(model: torch.nn.Module, values: dict[str, Any]) -> torch.optim.Optimizer:
    groups = parameter_groups(model, weight_decay=values["weight_decay"])
    lr, kind = values["lr"], values["optimizer"]
    momentum = {"momentum": values["momentum"], "nesterov": values["nesterov"]}
    adam = {"betas": tuple(values["betas"]), "eps": values["eps"]}
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=lr, **momentum)
    if kind == "lars":
        return Lars(groups, lr=lr, trust=values["trust"], **momentum)
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=lr, **adam)
    return Lamb(groups, lr=lr, **adam)


def _schedule(values: dict[str, Any], scale: float, steps: int) -> curves.Schedule:
    """Return warm-up and decay, in epochs."""
    epochs, warmup, kind = float(values["epochs"]), float(values["warmup_epochs"]), values["schedule"]
    start = values["warmup_start"]
    start = min(1.0, 1 / scale) if start is None else bounds.between("warmup_start", start, 0, 1)
    left = epochs - warmup
    if kind == "one_cycle":
        if warmup == 0:
            return curves.OneCycle(epochs)
        return curves.OneCycle(epochs, rise=warmup / epochs, start=start)
    if kind == "multi_step":
        if values["milestones"] is None:
            raise bounds.HyperparameterError("config must have milestones with multi_step, got None")
        decay = curves.MultiStep(values["milestones"], gamma=values["gamma"])
        return curves.Warmup(warmup, decay, start, overlap=True)
    then: curves.Schedule
    if kind == "polynomial":
        then = curves.Polynomial(left, power=values["power"])
    elif kind == "cosine":
        then = curves.Cosine(left)
    elif kind == "restarts":
        if values["cycle_epochs"] is None:
            raise bounds.HyperparameterError("config must have cycle_epochs with restarts, got None")
        then = curves.CosineRestarts(values["cycle_epochs"])
    elif kind == "inverse_sqrt":
        then = curves.InverseSqrt(max(warmup, 1 / steps))
    else:
        then = curves.Constant()
    return curves.Warmup(warmup, then, start)
