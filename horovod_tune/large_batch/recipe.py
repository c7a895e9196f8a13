"""Runs in each rank: builds optimiser, schedule and accumulation from a configuration."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from horovod_tune import bounds
from horovod_tune.large_batch import curves
from horovod_tune.large_batch.accumulation import GradientAccumulator, StepResult
from horovod_tune.large_batch.batches import (
    BatchSplit,
    GlobalBatch,
    rank_passes,
    split_batch,
    steps_per_epoch,
)
from horovod_tune.large_batch.layer_wise import Lamb, Lars, parameter_groups
from horovod_tune.large_batch.lr_scheduler import RULES, LargeBatchLR, scaling_factor
from horovod_tune.large_batch.noise_scale import NoiseScale
from horovod_tune.large_batch.world import horovod, rank, torch_distributed, world_size

# Arguments of `hvd.DistributedOptimizer`, which a world of one rank does not make.
_OF_HOROVOD = {"backward_passes_per_step", "compression", "gradient_predivide_factor", "groups"}
_OF_HOROVOD |= {"num_groups", "op", "process_set", "sparse_as_dense"}

# Each optimiser's class, the keys that are arguments of it, the rate that `relative_lr` multiplies, and the
# default rule of scaling.
# The rates are for batches of dozens to hundreds of samples: SGD as in Goyal et al. (2017), AdamW as in
# torch. The rate of LAMB, and that of LARS times `trust`, is about the fraction by which a layer's weights
# change per step.
# Malladi et al. derive "sqrt" for Adam; You et al. (2020) use it with LAMB. For LARS the papers do not agree
# on a rule; its steps depend only on the gradient's direction, whose noise falls with the root of the batch.
_OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], tuple[str, ...], float, str]] = {
    "sgd": (torch.optim.SGD, ("momentum", "nesterov"), 0.1, "linear"),
    "lars": (Lars, ("momentum", "nesterov", "trust"), 0.1, "sqrt"),
    "adamw": (torch.optim.AdamW, ("betas", "eps"), 1e-3, "sqrt"),
    "lamb": (Lamb, ("betas", "eps"), 5e-3, "sqrt"),
}

SCHEDULES = ("constant", "multi_step", "polynomial", "cosine", "one_cycle", "inverse_sqrt")

_positive, _not_negative = partial(bounds.number, more_than=0), partial(bounds.number, at_least=0)
# The default of each key, `...` if it has to be given, and its check; schedules check their own options.
_KEYS: dict[str, tuple[Any, Callable[[str, Any], Any] | None]] = {
    "epochs": (..., _positive),
    "base_batch_size": (..., bounds.count),
    "global_batch_size": (None, bounds.count),
    "local_batch_size": (None, bounds.count),
    "max_micro_batch_size": (None, bounds.count),
    "lr": (None, _positive),
    "relative_lr": (None, _positive),
    "scaling": (None, partial(bounds.one_of, choices=RULES)),
    "optimizer": ("sgd", partial(bounds.one_of, choices=_OPTIMIZERS)),
    "momentum": (0.9, partial(bounds.number, at_least=0, less_than=1)),
    "nesterov": (False, bounds.flag),
    "weight_decay": (0.0, _not_negative),
    # With the paper's 0.001, layers move only at rates of 5 and more. Biases and normalisation train at the
    # full rate, so networks without normalisation would diverge.
    "trust": (0.05, _not_negative),
    "betas": ((0.9, 0.999), bounds.betas),
    "eps": (1e-8, _not_negative),
    "max_norm": (None, _positive),
    "schedule": ("cosine", partial(bounds.one_of, choices=SCHEDULES)),
    "warmup_epochs": (0, _not_negative),
    "warmup_start": (None, partial(bounds.number, at_least=0, at_most=1)),
    "milestones": (None, None),
    "gamma": (0.1, None),
    "power": (2.0, None),
}
# A configuration has exactly one of each pair.
_ONE_OF = (("lr", "relative_lr"), ("global_batch_size", "local_batch_size"))
# Other libraries' names for these keys; always an error, since one could contradict the right key.
_OTHER_NAMES = {"learning_rate": "lr", "epoch": "epochs", "num_epochs": "epochs"}
_OTHER_NAMES |= {"warmup": "warmup_epochs", "wd": "weight_decay", "rule": "scaling"}


@dataclass(frozen=True)
class TrainingSetup:
    """The objects that `from_config` builds; each also works on its own.

    Attributes:
        optimizer: With several Horovod ranks, an ``hvd.DistributedOptimizer``.
        scheduler: The accumulator calls its `step()`.
        accumulator: Makes an optimiser step out of the passes.
        batch: The global batch, which can be resized and adapts to the number of ranks.
        noise_scale: Not measured if training starts on one rank with one pass per step.
    """

    optimizer: torch.optim.Optimizer
    scheduler: LargeBatchLR
    accumulator: GradientAccumulator
    batch: GlobalBatch
    noise_scale: NoiseScale

    @property
    def split(self) -> BatchSplit:
        """The current split of a global batch over the world."""
        return self.batch.split

    def follow_world(self) -> None:
        """Continue in a world that has changed its size in this process; see `GlobalBatch.follow_world`."""
        self.batch.follow_world()

    def batches(self, order: torch.Tensor) -> Iterator[list[torch.Tensor]]:
        """Yield, for each optimiser step of an epoch, the indices of this rank's passes: `rank_passes`.

        If the batch is resized between two steps, the next step has the new size.
        """
        while len(order):
            split = self.split
            batch, order = order[: split.global_batch_size], order[split.global_batch_size :]
            yield from rank_passes(batch, split, rank(self.accumulator.process_set))

    def backward(self, loss: torch.Tensor, *, samples: int) -> None:
        """Backpropagate ``loss``, the mean loss of a pass over ``samples`` samples."""
        self.accumulator.backward(loss, samples=samples)

    def step(self) -> StepResult:
        """Perform the optimiser step and advance the schedule."""
        return self.accumulator.step()

    def metrics(self) -> dict[str, float]:
        """Return metrics to report: the last step's rate, the global batch and, if known, the noise scale."""
        used = self.scheduler.rate_used
        lr = used if used is not None else float(self.optimizer.param_groups[0]["lr"])
        reported = {"lr": lr, "global_batch_size": self.split.global_batch_size}
        estimate = self.noise_scale.estimate()
        if estimate is not None:
            reported |= {"noise_scale": estimate.noise_scale}
            reported |= {"noise_scale_low": estimate.low, "noise_scale_high": estimate.high}
        return reported

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parts, which ``torch.load(weights_only=True)`` reads."""
        scaler = self.accumulator.scaler
        return {
            "kind": type(self.optimizer).__name__,
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "noise_scale": self.noise_scale.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict` at the same epoch, with the rates and the batch of this configuration.

        So PBT may change a trial's configuration between saving and loading. If the kind of optimiser has
        changed, the new optimiser's state starts empty.
        """
        missing = sorted({"kind", "optimizer", "scheduler", "noise_scale", "scaler"} - set(state_dict))
        if missing:
            lacks = f"it lacks {', '.join(missing)}"
            raise bounds.HyperparameterError(f"state_dict must be one of TrainingSetup.state_dict(), {lacks}")
        if state_dict["kind"] == type(self.optimizer).__name__:
            fresh = self.optimizer.state_dict()["param_groups"]
            self.optimizer.load_state_dict({**state_dict["optimizer"], "param_groups": fresh})
        base = self.scheduler.base_batch_size
        self.scheduler.load_state_dict({**state_dict["scheduler"], "base_batch_size": base})
        self.batch.resize(self.split.global_batch_size)
        self.noise_scale.load_state_dict(state_dict["noise_scale"])
        scaler = self.accumulator.scaler
        if scaler is not None and state_dict["scaler"] is not None:
            scaler.load_state_dict(state_dict["scaler"])


def from_config(
    model: torch.nn.Module,
    config: Mapping[str, Any],
    *,
    num_samples: int,
    scaler: Any = None,
    noise_scale: NoiseScale | None = None,
    elastic: bool = False,
    **distributed: Any,
) -> TrainingSetup:
    """Return optimiser, schedule and accumulation for a configuration, in the world that this rank is in.

    Call it after ``hvd.init()``, and broadcast the model's parameters as usual; with torch.distributed, pass
    the ``DistributedDataParallel``. The keys of `config`:

    * ``epochs`` and ``base_batch_size``, the batch for which rates are tuned (both required)
    * exactly one of ``global_batch_size``, over all ranks, and ``local_batch_size``, per rank; if it is the
      local one, the global batch and the rate scale with the number of ranks
    * exactly one of ``lr``, the rate for a batch of ``base_batch_size``, and ``relative_lr``, that rate as a
      multiple of the optimiser's usual one (0.1 for SGD and LARS, 0.001 for AdamW, 0.005 for LAMB)
    * ``scaling``: ``linear``, ``sqrt`` or ``none``; by default ``linear`` for SGD and ``sqrt`` for the others
    * ``max_micro_batch_size``: the most samples of a rank in a pass
    * ``optimizer``: ``sgd``, ``lars``, ``adamw`` or ``lamb``; with ``momentum`` and ``nesterov`` (SGD, LARS),
      ``trust`` (LARS), ``betas`` and ``eps`` (AdamW, LAMB), ``weight_decay``, ``max_norm``
    * ``schedule``: ``constant``, ``multi_step`` (with ``milestones`` in epochs of the training, ``gamma``),
      ``polynomial`` (``power``), ``cosine``, ``one_cycle``, ``inverse_sqrt``
    * ``warmup_epochs``, and ``warmup_start``, a fraction of the peak rate; by default the base rate, as in
      Goyal et al. (2017)

    Other keys are yours and are ignored. A key is an error if it looks like a misspelling of one of these, or
    if it is another library's name for one, such as ``learning_rate``.

    Args:
        model: Its parameters are grouped by `parameter_groups`.
        config: A trial's configuration.
        num_samples: Samples in the training set, over all ranks.
        scaler: A ``torch.amp.GradScaler``.
        noise_scale: By default ``NoiseScale()``. With ``every=1`` its interval narrows sooner. It is not
            updated if training starts on one rank with one pass per step.
        elastic: If True, the number of ranks may change. A global batch that is not a multiple of it is then
            split as evenly as possible instead of being an error.
        **distributed: Arguments of ``hvd.DistributedOptimizer``, such as ``compression``; none with
            torch.distributed.

    Raises:
        HyperparameterError: A key or argument is missing, misspelt or out of bounds, the batch is not a
            multiple of the number of ranks, or the warm-up is not shorter than the training.

    >>> config = {"lr": 0.1, "epochs": 4, "base_batch_size": 32, "global_batch_size": 128, "warmup_epochs": 1}
    >>> setup = from_config(torch.nn.Linear(2, 1), config, num_samples=1024)
    >>> setup.optimizer.param_groups[0]["lr"], setup.split.passes, setup.scheduler.scale
    (0.1, 1, 4.0)
    """
    values = _checked(config)
    if unknown := sorted(distributed.keys() - _OF_HOROVOD):
        of = "from_config or of hvd.DistributedOptimizer"
        raise bounds.HyperparameterError(f"{', '.join(unknown)} must be an argument of {of}")
    hvd = horovod()
    if torch_distributed() is not None:
        if distributed:
            raise bounds.HyperparameterError(
                f"{', '.join(distributed)} must be left out with torch.distributed, which has no "
                "hvd.DistributedOptimizer"
            )
        process_set = getattr(model, "process_group", None)
    else:
        process_set = distributed.get("process_set")
    world = world_size(process_set)
    local, largest = values["local_batch_size"], values["max_micro_batch_size"]
    batch_size = values["global_batch_size"] if local is None else local * world
    split = split_batch(batch_size, world, largest, even=not elastic)
    make, options, *_ = _OPTIMIZERS[values["optimizer"]]
    groups = parameter_groups(model, weight_decay=values["weight_decay"])
    optimizer: Any = make(groups, lr=values["lr"], **{name: values[name] for name in options})
    if hvd is not None and world > 1:
        named = list(model.named_parameters())
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=named, **distributed)
    steps = steps_per_epoch(num_samples, batch_size)
    rule = values["scaling"]
    scheduler = LargeBatchLR(
        optimizer,
        _schedule(values, scaling_factor(batch_size, values["base_batch_size"], rule), steps),
        steps_per_epoch=steps,
        global_batch_size=batch_size,
        base_batch_size=values["base_batch_size"],
        rule=rule,
    )
    noise_scale = noise_scale or NoiseScale()
    accumulator = GradientAccumulator(
        optimizer,
        passes=split.passes,
        local_batch_size=split.local_batch_size,
        max_norm=values["max_norm"],
        scaler=scaler,
        scheduler=scheduler,
        noise_scale=noise_scale if world * split.passes > 1 else None,
        model=model,
    )
    batch = GlobalBatch(
        split,
        accumulator=accumulator,
        scheduler=scheduler,
        num_samples=num_samples,
        max_micro_batch_size=largest,
        keep="global" if local is None else "local",
        even=not elastic,
    )
    return TrainingSetup(optimizer, scheduler, accumulator, batch, noise_scale)


def _checked(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checked configuration with defaults, the rate and the rule of scaling."""
    if not isinstance(config, Mapping):
        raise bounds.HyperparameterError(f"config must be a dict, got {config!r:.200}")
    missing = _KEYS.keys() - config.keys()
    for pair in _ONE_OF:
        if any(config.get(name) is not None for name in pair):
            missing -= set(pair)
    for key in config.keys() - _KEYS.keys():
        name = str(key).lower()
        close = difflib.get_close_matches(name, missing, n=1, cutoff=0.88)
        if meant := name if name in _KEYS else _OTHER_NAMES.get(name, "".join(close)):
            raise bounds.HyperparameterError(f"config has no key {key!r}, did you mean {meant!r}?")
    required = sorted(name for name in missing if _KEYS[name][0] is ...)
    if required:
        raise bounds.HyperparameterError(f"config must have {', '.join(required)}, got {sorted(config)}")
    values = {}
    for name, (default, check) in _KEYS.items():
        value = config.get(name, default)
        # The checks return Python's own numbers: torch.load(weights_only=True) refuses NumPy's.
        if check is not None and (value is not None or default is not None):
            value = check(name, value)
        values[name] = value
    for one, other in _ONE_OF:
        if (values[one] is None) == (values[other] is None):
            got = f"{one}={values[one]} and {other}={values[other]}"
            raise bounds.HyperparameterError(f"config must have exactly one of {one} and {other}, got {got}")
    if values["warmup_epochs"] >= values["epochs"]:
        bound = f"less than epochs ({values['epochs']:g})"
        raise bounds.HyperparameterError(f"warmup_epochs must be {bound}, got {config['warmup_epochs']!r}")
    *_, usual_rate, rule = _OPTIMIZERS[values["optimizer"]]
    if values["lr"] is None:
        values["lr"] = values["relative_lr"] * usual_rate
    values["scaling"] = values["scaling"] or rule
    return values


def _schedule(values: dict[str, Any], scale: float, steps: int) -> curves.Schedule:
    """Return warm-up and decay, in epochs of `steps`."""
    epochs, warmup, start = values["epochs"], values["warmup_epochs"], values["warmup_start"]
    start = min(1.0, 1 / scale) if start is None else start
    decay: curves.Schedule
    match values["schedule"]:
        case "one_cycle":
            return curves.OneCycle(epochs, warmup / epochs, start) if warmup else curves.OneCycle(epochs)
        case "multi_step":
            if values["milestones"] is None:
                raise bounds.HyperparameterError("config must have milestones with multi_step, got None")
            decay = curves.MultiStep(values["milestones"], gamma=values["gamma"])
            return curves.Warmup(warmup, decay, start, overlap=True)
        case "polynomial":
            decay = curves.Polynomial(epochs - warmup, power=values["power"])
        case "cosine":
            decay = curves.Cosine(epochs - warmup)
        case "inverse_sqrt":
            decay = curves.InverseSqrt(max(warmup, 1 / steps))
        case _:
            decay = curves.Constant()
    return curves.Warmup(warmup, decay, start)
