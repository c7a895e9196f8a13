"""Runs in each rank: an optimiser step from several passes, with one average over the ranks per step."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from horovod_tune import bounds
from horovod_tune.large_batch.layer_wise import norms
from horovod_tune.large_batch.noise_scale import NoiseScale, gradient_norms
from horovod_tune.large_batch.world import (
    averages,
    gather_async,
    sum_gradients,
    torch_distributed,
    world_size,
)


class StepResult(NamedTuple):
    """The result of an optimiser step.

    Attributes:
        stepped: False if a GradScaler skipped the step because of an overflow; all ranks skip it together.
        samples: The number of samples in the step, over all ranks and passes.
        gradient_norm: The norm of the averaged gradient before clipping; None without `max_norm`, except in
            steps that measure the noise scale.
    """

    stepped: bool
    samples: int
    gradient_norm: float | None


class GradientAccumulator:
    r"""Makes one optimiser step out of a group of backward passes on each rank.

    .. math:: g = \sum_{r,i} n_{ri} \nabla L_{ri} \Big/ \sum_{r,i} n_{ri}

    where :math:`L_{ri}` is the mean loss of the :math:`n_{ri}` samples in pass i of rank r. This g is the
    gradient of the mean loss over all samples of the step, even if the last group is shorter or ranks have
    different numbers of samples. (Horovod's ``backward_passes_per_step`` weights all passes equally.)

    `step` averages over the ranks, unscales (AMP), clips by the global norm, updates the weights, advances
    the schedule and zeroes the gradients, in this order. Overflows are detected after the average, so that
    all ranks skip a step or none does. The schedule does not count skipped steps.

    Every rank must call `step` the same number of times. A rank without samples for a step calls `step`
    without calling `backward` first.

    Args:
        optimizer: With several Horovod ranks, an ``hvd.DistributedOptimizer`` with ``op=Average`` or
            ``Sum``; its ``backward_passes_per_step`` is set here. With torch.distributed, any optimiser.
        passes: Backward passes in a full group.
        local_batch_size: Samples of this rank in a full group. Summed losses are divided by it, so that half
            precision gradients do not overflow; the result does not depend on it.
        max_norm: The global norm that gradients are clipped to.
        scaler: A ``torch.amp.GradScaler``.
        scheduler: Its `step()` is called after each optimiser step.
        noise_scale: A `NoiseScale`, which is updated in every ``noise_scale.every``-th step.
        model: The model that is trained; only torch.distributed needs it. A ``DistributedDataParallel``
            stops averaging in backward passes, as under ``no_sync()``: `step` averages instead.

    Raises:
        HyperparameterError: A number is out of bounds; the optimiser neither averages nor sums over ranks;
            the model is missing or sharded; or a noise scale is requested for one pass on one rank.

    >>> weight = torch.nn.Parameter(torch.zeros(1))
    >>> accumulator = GradientAccumulator(torch.optim.SGD([weight], lr=1.0), passes=2, local_batch_size=4)
    >>> for samples in (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([6.0])):  # two unequal passes
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
        model: torch.nn.Module | None = None,
    ) -> None:
        of_model = getattr(model, "process_group", None) if torch_distributed() is not None else None
        self.process_set = getattr(optimizer, "process_set", of_model)
        self._world_size = world_size(self.process_set)
        self._made_alone = self._world_size == 1
        self._averages = averages(optimizer, self._world_size, model)
        self._model = model
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model.require_backward_grad_sync = False
        if max_norm is not None:
            bounds.number("max_norm", max_norm, more_than=0)
        self.optimizer = optimizer
        self.noise_scale = noise_scale
        # A disabled scaler passes everything through, and skips no step.
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._max_norm, self._scheduler = max_norm, scheduler
        self._steps = 0
        self.passes = 1
        self._start_group()
        self.resize(passes, local_batch_size)
        if noise_scale is not None and self._world_size * passes == 1:
            raise bounds.HyperparameterError(
                "passes must be at least 2 on one rank, as a noise scale compares two batch sizes; got 1"
            )

    @property
    def full(self) -> bool:
        """True if the group has all its passes, so that `step` is due."""
        return self._done == self.passes

    def resize(self, passes: int, local_batch_size: int) -> None:
        """Change the group, between two optimiser steps."""
        passes = bounds.count("passes", passes)
        local_batch_size = bounds.count("local_batch_size", local_batch_size, passes)
        if self._done:
            done = f"{self._done} of {self.passes} passes are done"
            raise bounds.HyperparameterError(f"resize() must be called between two steps, but {done}")
        self.passes, self.local_batch_size = passes, local_batch_size
        if hasattr(self.optimizer, "set_backward_passes_per_step"):
            self.optimizer.set_backward_passes_per_step(passes)

    def restart(self) -> int:
        """Discard an unfinished group after the world has changed; return the new number of ranks.

        Raises:
            HyperparameterError: Horovod's optimiser was made for a single rank, and there are more now; or
                with torch.distributed, the model is missing or sharded.
        """
        self._world_size = world_size(self.process_set)
        if self._made_alone and self._world_size > 1 and torch_distributed() is None:
            raise bounds.HyperparameterError(
                f"optimizer must be made again with {self._world_size} ranks, got one that was made with 1 "
                "rank, for which Horovod prepares no average"
            )
        self._averages = averages(self.optimizer, self._world_size, self._model)
        self._start_group()
        # Loading a state makes Horovod's wrapper forget its pending collectives.
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.optimizer.zero_grad()
        return self._world_size

    def backward(self, loss: torch.Tensor, *, samples: int) -> None:
        """Add the gradients of a pass to the group's; with Horovod, the last pass starts the average.

        Args:
            loss: The mean loss of the pass, a scalar.
            samples: The number of samples in the pass.
        """
        samples = bounds.count("samples", samples)
        if self.full:
            full = f"step() must be called after {self.passes} passes"
            raise bounds.HyperparameterError(f"{full}, got another backward()")
        weight = samples / self.local_batch_size
        weighted = loss * weight
        scale = 1.0
        if self.scaler is not None:
            weighted = self.scaler.scale(weighted)
            scale = self.scaler.get_scale()
        # One pass is enough: the estimate depends more on the number of steps.
        if self._measures and self._done == 0:
            with gradient_norms(self._parameters()) as sizes:
                weighted.backward()
            square = float(torch.stack(sizes).double().square().sum()) if sizes else 0.0
            self._square = square / (weight * scale) ** 2
            self._inverse = 1 / samples
        else:
            weighted.backward()
        self._done += 1
        self._samples += samples

    def step(self) -> StepResult:
        """Average over passes and ranks and perform the optimiser step; the group need not be full.

        Raises:
            HyperparameterError: No rank has samples; or the gradient is not finite, there is no scaler to
                skip the step, and the norm is needed (`max_norm`, noise scale); or it has not been finite for
                so long that the scale is 0. Raised on all ranks.
        """
        measures = self._measures
        row = [self._samples, self._done, self._square, self._inverse, self._steps, measures]
        row += [parameter.grad is not None for parameter in self._parameters()]
        pending = gather_async(row, self.process_set)
        if hasattr(self.optimizer, "synchronize"):
            self.optimizer.synchronize()
        elif self._world_size > 1:
            sum_gradients(self._parameters(), self.process_set)
        numbers, dones, squares, inverses, steps, measured, *used = zip(*pending(), strict=True)
        # The sum has made zeros of those that no rank has. A step with zeros would apply momentum and decay.
        for parameter, has_gradient in zip(self._parameters(), used, strict=True):
            if not any(has_gradient):
                parameter.grad = None
        samples, passes = sum(numbers), sum(dones)
        self._start_group()
        # A rank that joins starts at 0. From here on all ranks have the same count, so they measure together.
        self._steps = int(max(steps)) + 1
        bounds.count("samples over all ranks", int(samples))
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        divided_by = self._world_size if self._averages else 1
        try:
            norm = self._scale_gradients(divided_by * self.local_batch_size / samples, measures)
            stepped = self._optimizer_step()
        finally:  # Also if the caller catches the error of a gradient that is not finite.
            self.optimizer.zero_grad()
        if stepped and self._scheduler is not None:
            self._scheduler.step()
        if stepped and self.noise_scale is not None and norm is not None and all(measured) and passes > 1:
            ranks = sum(done > 0 for done in dones)  # Some may have had no samples.
            self.noise_scale.update(sum(squares) / ranks, sum(inverses) / ranks, norm**2, samples)
        return StepResult(stepped, int(samples), norm)

    @property
    def _measures(self) -> bool:
        """True if this step measures the noise scale."""
        return self.noise_scale is not None and self._steps % self.noise_scale.every == 0

    def _start_group(self) -> None:
        self._done = self._samples = 0
        self._square = self._inverse = 0.0

    def _parameters(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def _scale_gradients(self, factor: float, measures: bool) -> float | None:
        """Multiply by `factor` and clip in one operation; return the norm before clipping, None if unused."""
        gradients = [parameter.grad for parameter in self._parameters() if parameter.grad is not None]
        norm = None
        if measures or self._max_norm is not None:
            norm = factor * math.hypot(*norms(gradients))
            if not math.isfinite(norm) and self.scaler is None:
                raise bounds.HyperparameterError(f"the gradient's norm must be finite, got {norm}")
        if self._max_norm is not None and norm is not None:
            # As in torch.nn.utils.clip_grad_norm_.
            factor *= min(1.0, self._max_norm / (norm + 1e-6))
        if factor != 1 and math.isfinite(factor):
            for gradient in gradients:
                gradient.mul_(factor)
        return norm

    def _optimizer_step(self) -> bool:
        with getattr(self.optimizer, "skip_synchronize", nullcontext)():
            if self.scaler is None:
                self.optimizer.step()
                return True
            self.scaler.step(self.optimizer)
        before = self.scaler.get_scale()
        self.scaler.update()
        # The scaler lowers its scale after an overflow, and never otherwise.
        scale = bounds.number(
            "the loss scale, which a gradient that is not finite lowers,",
            self.scaler.get_scale(),
            more_than=0,
        )
        return scale >= before
