"""Runs in each rank: an optimiser step from several passes, with communication in the last of them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from horovod_tune.large_batch import bounds
from horovod_tune.large_batch.noise_scale import GradientNorms, NoiseScale
from horovod_tune.large_batch.world import gather_async, horovod, world_size


class StepResult(NamedTuple):
    """What came of an optimiser step.

    Attributes:
        stepped: False where a GradScaler skipped the step because of an overflow, which it does on all ranks.
        samples: Of all ranks and passes.
        gradient_norm: Of the averaged gradient before clipping; None with neither `max_norm` nor
            `noise_scale`.
    """

    stepped: bool
    samples: int
    gradient_norm: float | None


class GradientAccumulator:
    r"""Makes one optimiser step out of several backward passes on each rank.

    .. math:: g = \sum_{r,i} n_{ri} \nabla L_{ri} \Big/ \sum_{r,i} n_{ri}

    where pass i of rank r has the mean loss :math:`L_{ri}` of :math:`n_{ri}` samples: the gradient of the
    mean loss over all samples of the step, also where a last group is shorter or ranks have different
    numbers. Horovod's ``backward_passes_per_step`` alone sums the passes, and weighs a short pass like a
    long one.

    In `step`, in this order: average over the ranks, unscale (AMP), clip by the global norm, optimiser step,
    schedule, zero the gradients. Overflows are looked for after the average, so that all ranks skip a step or
    none does, and the schedule counts optimiser steps only.

    Every rank calls `step` equally often; one without samples in a group calls it without `backward`.

    Args:
        optimizer: A ``hvd.DistributedOptimizer`` where there are several ranks, with ``op=Average`` or
            ``Sum``; its ``backward_passes_per_step`` is set here.
        passes: Backward passes in a full group.
        local_batch_size: Samples of this rank in a full group. It scales what is sent, for half precision;
            the result does not depend on it.
        max_norm: The global norm that gradients are clipped to.
        scaler: A ``torch.amp.GradScaler``.
        scheduler: Its `step()` is called after each optimiser step.
        noise_scale: Is updated in each step.

    Raises:
        HyperparameterError: A number is out of bounds; the optimiser does not average over the ranks; or a
            noise scale is wanted of a single pass on a single rank.

    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> accumulator = GradientAccumulator(torch.optim.SGD([weight], lr=1.0), passes=2, local_batch_size=4)
    >>> for samples in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([6.0])):  # not 3 + 1 equal ones
    ...     accumulator.backward((weight * samples).mean(), samples=len(samples))
    >>> accumulator.step()
    StepResult(stepped=True, samples=4, gradient_norm=None)
    >>> weight.item()  # minus the mean of all four
    -3.0
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        *,
        passes: int,
        local_batch_size: int,
        max_norm: float | None = None,
        scaler: Any = None,
        scheduler: Any = None,
        noise_scale: NoiseScale | None = None,
    ) -> None:
        self._process_set = getattr(optimizer, "process_set", None)
        self._world_size = world_size(self._process_set)
        self._averages = _check_optimizer(optimizer, self._world_size)
        if max_norm is not None:
            bounds.more_than("max_norm", max_norm, 0)
        self.optimizer = optimizer
        self.noise_scale = noise_scale
        self._max_norm, self._scaler, self._scheduler = max_norm, scaler, scheduler
        self._norms = GradientNorms(self._parameters()) if noise_scale else None
        self.passes = 1
        self._start_group()
        self.resize(passes, local_batch_size)

    @property
    def full(self) -> bool:
        """Whether the group has all its passes, so that `step` is due."""
        return self._done == self.passes

    def resize(self, passes: int, local_batch_size: int) -> None:
        """Change the group, between two optimiser steps.

        Raises:
            HyperparameterError: A number is out of bounds, or the group has begun.
        """
        bounds.count("passes", passes)
        bounds.count("local_batch_size", local_batch_size, passes)
        if self._done:
            raise bounds.HyperparameterError(
                f"a group must not change after it has begun, {self._done} of {self.passes} passes are done"
            )
        if self.noise_scale is not None and self._world_size * passes == 1:
            raise bounds.HyperparameterError(
                "passes must be at least 2 for a noise scale on one rank, which compares batch sizes; got 1"
            )
        self.passes, self.local_batch_size = passes, local_batch_size
        if hasattr(self.optimizer, "set_backward_passes_per_step"):
            self.optimizer.set_backward_passes_per_step(passes)

    def backward(self, loss: torch.Tensor, *, samples: int) -> None:
        """Compute the gradients of a pass and add them up; the last pass of a full group starts the average.

        Args:
            loss: The mean loss of the pass, a scalar.
            samples: How many samples it is the mean of.

        Raises:
            HyperparameterError: `samples` is below 1, or the group is full.
        """
        bounds.count("samples", samples)
        if self.full:
            raise bounds.HyperparameterError(
                f"step() must be called after {self.passes} passes, got another backward()"
            )
        weight = samples / self.local_batch_size
        weighted = loss * weight
        scale = 1.0
        if self._scaler is not None:
            weighted = self._scaler.scale(weighted)
            scale = self._scaler.get_scale()
        if self._norms is not None:
            self._norms.forget()
        weighted.backward()
        self._done += 1
        self._samples += samples
        if self._norms is not None:
            self._squares += self._norms.take() / (weight * scale) ** 2
            self._inverses += 1 / samples

    def step(self) -> StepResult:
        """Average over passes and ranks and make the optimiser step; a group may be shorter than full.

        Raises:
            HyperparameterError: On all ranks, where no rank has samples.
            RuntimeError: The gradient is not finite and is to be clipped, without a scaler to skip the step.
        """
        pending = gather_async(
            [self._samples, self._done, self._squares, self._inverses], "accumulation", self._process_set
        )
        if hasattr(self.optimizer, "synchronize"):
            self.optimizer.synchronize()
        samples, passes, squares, inverses = (sum(column) for column in zip(*pending(), strict=True))
        self._start_group()
        bounds.count("samples over all ranks", int(samples))
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        self._rescale((self._world_size if self._averages else 1) * self.local_batch_size / samples)
        norm = self._clip()
        stepped = self._optimizer_step()
        if stepped and self._scheduler is not None:
            self._scheduler.step()
        if stepped and self.noise_scale is not None and norm is not None and passes > 1:
            self.noise_scale.update(squares / passes, inverses / passes, norm**2, samples)
        self.optimizer.zero_grad()
        return StepResult(stepped, int(samples), norm)

    def _start_group(self) -> None:
        self._done = self._samples = 0
        self._squares = self._inverses = 0.0

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _rescale(self, factor: float) -> None:
        if factor != 1:
            for parameter in self._parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def _clip(self) -> float | None:
        """Clip by the global norm; return that before, None where nobody asks for it."""
        if self._max_norm is None and self.noise_scale is None:
            return None
        limit = float("inf") if self._max_norm is None else self._max_norm
        finite = self._scaler is None and self._max_norm is not None
        return float(torch.nn.utils.clip_grad_norm_(self._parameters(), limit, error_if_nonfinite=finite))

    def _optimizer_step(self) -> bool:
        skip: AbstractContextManager[None] = nullcontext()
        if hasattr(self.optimizer, "skip_synchronize"):
            skip = self.optimizer.skip_synchronize()
        with skip:
            if self._scaler is None:
                self.optimizer.step()
                return True
            self._scaler.step(self.optimizer)
        before = self._scaler.get_scale()
        self._scaler.update()
        # The scaler lowers its scale after an overflow, and never otherwise.
        return bool(self._scaler.get_scale() >= before)


def _check_optimizer(optimizer: Any, size: int) -> bool:
    """Return whether the optimiser averages over the ranks, rather than summing."""
    hvd = horovod()
    if hvd is None or size == 1:
        return True
    if not hasattr(optimizer, "synchronize"):
        raise bounds.HyperparameterError(
            f"optimizer must be a hvd.DistributedOptimizer in a world of {size} ranks, "
            f"got {type(optimizer).__name__}"
        )
    if getattr(optimizer, "op", None) not in (hvd.Average, hvd.Sum):
        raise bounds.HyperparameterError(
            "op of hvd.DistributedOptimizer must be Average or Sum, got Adasum, which has no weighted mean"
        )
    return bool(optimizer.op == hvd.Average)
