"""`LargeBatchLR`: a schedule and a scaling rule as a torch `LRScheduler`."""

from __future__ import annotations

import copy
import math
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from horovod_tune import bounds
from horovod_tune.large_batch.curves import Schedule

_KEPT = ("last_epoch", "_step_count", "_reduction", "steps_per_epoch", "global_batch_size", "base_batch_size")


class LargeBatchLR(LRScheduler):
    r"""Sets each rate to its group's base rate, times the scaling rule's factor, times the schedule's value.

    .. math:: \eta_g(t) = \eta_g\, s(B/B_0)\, f(t), \quad t = \text{steps} / \text{steps per epoch}

    Time is kept as a fraction, so that it accumulates no rounding errors when the batch changes or training
    is resumed. Call `step()` after each optimiser step (not after each pass of an accumulation).

    Args:
        optimizer: Its groups' ``lr`` are the base rates, tuned for `base_batch_size`. May be
            a ``hvd.DistributedOptimizer``.
        schedule: A function of the time: one of `horovod_tune.large_batch`, or your own.
        steps_per_epoch: Optimiser steps in an epoch; with 1, the schedule's lengths count steps.
        global_batch_size: Samples in an optimiser step, over all ranks; None for no scaling.
        base_batch_size: The global batch size for which the base rates were tuned.
        rule: ``linear``, ``sqrt`` or ``none``; see `scaling_factor`.

    >>> from horovod_tune.large_batch import Constant, Warmup
    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    >>> warmup = Warmup(2, Constant(), start=0.25)
    >>> scheduler = LargeBatchLR(
    ...     optimizer, warmup, steps_per_epoch=2, global_batch_size=1024, base_batch_size=256
    ... )
    >>> rates = []
    >>> for step in range(5):
    ...     rates.append(round(optimizer.param_groups[0]["lr"], 12))
    ...     optimizer.step()
    ...     scheduler.step()
    >>> rates
    [0.1, 0.175, 0.25, 0.325, 0.4]
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        *,
        steps_per_epoch: int,
        global_batch_size: int | None = None,
        base_batch_size: int | None = None,
        rule: str = "linear",
    ) -> None:
        if (global_batch_size is None) != (base_batch_size is None):
            raise bounds.HyperparameterError(
                "global_batch_size and base_batch_size must be given together, "
                f"got {global_batch_size!r} and {base_batch_size!r}"
            )
        if not callable(schedule):
            raise bounds.HyperparameterError(f"schedule must be a function of the time, got {schedule!r}")
        self.schedule = schedule
        self.rule = bounds.one_of("rule", rule, RULES)
        self.global_batch_size, self.base_batch_size = global_batch_size, base_batch_size
        if global_batch_size is not None:
            self.global_batch_size = bounds.count("global_batch_size", global_batch_size)
            self.base_batch_size = bounds.count("base_batch_size", base_batch_size)
        self.steps_per_epoch = bounds.count("steps_per_epoch", steps_per_epoch)
        # The exact time in epochs, one step early because the base class's constructor calls `step` once.
        self.epoch = Fraction(-1, self.steps_per_epoch)
        self._reduction = 1.0
        #: The first group's rate in the last optimiser step; None before the first.
        self.rate_used: float | None = None
        super().__init__(optimizer)

    @property
    def scale(self) -> float:
        """The scaling rule's factor for the current global batch."""
        if self.global_batch_size is None or self.base_batch_size is None:
            return 1.0
        return scaling_factor(self.global_batch_size, self.base_batch_size, self.rule)

    def step(self) -> None:  # type: ignore[override]
        """Advance by one optimiser step, and the epoch by 1 / `steps_per_epoch`."""
        if self.epoch >= 0:
            self.rate_used = float(self.optimizer.param_groups[0]["lr"])
        self.epoch += Fraction(1, self.steps_per_epoch)
        super().step()

    def get_lr(self) -> list[Any]:
        """Return each group's rate for the next optimiser step."""
        epoch = float(self.epoch)
        part = self.schedule(epoch)
        if not math.isfinite(part) or part < 0:
            got = f"{part!r} at epoch {epoch:g}"
            raise bounds.HyperparameterError(f"schedule must be finite and at least 0, got {got}")
        for group in self.optimizer.param_groups[len(self.base_lrs) :]:  # Groups added since the last call.
            self.base_lrs.append(copy.deepcopy(group["lr"]))
        # Python's own number, since torch.load(weights_only=True) refuses a checkpoint with NumPy's.
        factor = self.scale * float(part) * self._reduction
        return [base * factor for base in self.base_lrs]

    def change_batch(self, global_batch_size: int | None = None, *, steps_per_epoch: int) -> None:
        """Continue at the same epoch with another global batch; the rate follows by the scaling rule.

        Args:
            global_batch_size: The new global batch size; None keeps the current one.
            steps_per_epoch: Optimiser steps in an epoch from now on.
        """
        steps_per_epoch = bounds.count("steps_per_epoch", steps_per_epoch)
        if global_batch_size is not None:
            global_batch_size = bounds.count("global_batch_size", global_batch_size)
            if self.base_batch_size is None:
                raise bounds.HyperparameterError(
                    "base_batch_size must be given to LargeBatchLR before the batch can change, got None"
                )
            self.global_batch_size = global_batch_size
        self.steps_per_epoch = steps_per_epoch
        self._set_rates()

    def reduce(self, factor: float) -> None:
        """Multiply all rates by `factor`, more than 0 and at most 1, from now on."""
        self._reduction *= bounds.number("factor", factor, more_than=0, at_most=1)
        self._set_rates()

    def state_dict(self) -> dict[str, Any]:
        """Return the time and the batch as plain numbers; base rates and schedule are not in it."""
        epoch, groups = [self.epoch.numerator, self.epoch.denominator], len(self.optimizer.param_groups)
        return {"epoch": epoch, "groups": groups, **{name: getattr(self, name) for name in _KEPT}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`, and set the optimiser's rates.

        Call it before or after the optimiser's own `load_state_dict`. If the world or the batch has changed,
        call `change_batch` afterwards.
        """
        groups, got = len(self.optimizer.param_groups), state_dict["groups"]
        if got != groups:
            raise bounds.HyperparameterError(f"state_dict must have {groups} parameter groups, got {got}")
        self.epoch = Fraction(*state_dict["epoch"])
        for name in _KEPT:
            setattr(self, name, state_dict[name])
        self._set_rates()

    def _set_rates(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self._last_lr = [rate.clone() if isinstance(rate, torch.Tensor) else rate for rate in rates]


RULES = ("linear", "sqrt", "none")


def scaling_factor(global_batch_size: int, base_batch_size: int, rule: str = "linear") -> float:
    r"""Return the factor for the base learning rate, with :math:`k = B / B_0`.

    * ``linear``, :math:`k`: SGD with or without momentum (Goyal et al. 2017, arXiv:1706.02677). One step is
      about equal to k steps with the base batch if gradients change little between those. At first they
      change a lot, hence a warm-up.
    * ``sqrt``, :math:`\sqrt k`: Adam-like optimisers (Malladi et al. 2022, arXiv:2205.10287; for Adam's betas
      and epsilon see `scaled_adam`), LAMB (You et al. 2020, arXiv:1904.00962). For SGD it keeps the variance
      of a step (Krizhevsky 2014, arXiv:1404.5997, who then used ``linear``).
    * ``none``, 1.

    Args:
        global_batch_size: Samples in an optimiser step, over all ranks and passes.
        base_batch_size: The global batch size for which the base rate was tuned.
        rule: ``linear``, ``sqrt`` or ``none``.

    >>> [scaling_factor(4096, 256, rule) for rule in ("linear", "sqrt", "none")]
    [16.0, 4.0, 1.0]
    """
    base_batch_size = bounds.count("base_batch_size", base_batch_size)
    k = bounds.count("global_batch_size", global_batch_size) / base_batch_size
    return {"linear": k, "sqrt": math.sqrt(k), "none": 1.0}[bounds.one_of("rule", rule, RULES)]


class AdamHyperparameters(NamedTuple):
    """Arguments of `torch.optim.AdamW` and `Lamb`."""

    lr: float
    betas: tuple[float, float]
    eps: float


def scaled_adam(
    lr: float, betas: tuple[float, float], eps: float, *, global_batch_size: int, base_batch_size: int
) -> AdamHyperparameters:
    r"""Return Adam's hyperparameters for a batch that is k times as large, by the square root rule.

    .. math:: \eta' = \sqrt k\,\eta,\quad 1-\beta_i' = k\,(1-\beta_i),\quad \epsilon' = \epsilon/\sqrt k

    (Malladi et al. 2022, arXiv:2205.10287, definition 5.2.) Adam's moving averages then reach back over as
    many samples as before, not as many steps. A beta must not become negative: :math:`k \le 1/(1-\beta)`.

    >>> scaled_adam(1e-3, (0.75, 0.9375), 2e-8, global_batch_size=1024, base_batch_size=256)
    AdamHyperparameters(lr=0.002, betas=(0.0, 0.75), eps=1e-08)
    """
    lr, eps = bounds.number("lr", lr, at_least=0), bounds.number("eps", eps, at_least=0)
    root = scaling_factor(global_batch_size, base_batch_size, "sqrt")
    k = scaling_factor(global_batch_size, base_batch_size)
    scaled = []
    for index, beta in enumerate(bounds.betas("betas", betas)):
        rest = k * (1 - beta)
        if rest > 1 + 1e-9:  # k = 20 and beta = 0.95 give a little more than 1
            raise bounds.HyperparameterError(
                f"global_batch_size must be at most {1 / (1 - beta):g} times base_batch_size for "
                f"betas[{index}]={beta:g}, got {k:g} times"
            )
        scaled.append(max(0.0, 1 - rest))
    return AdamHyperparameters(root * lr, (scaled[0], scaled[1]), eps / root)
