"""Runs in each rank: applies a growth policy to accumulation, rate and schedule together."""

from __future__ import annotations

from typing import Any

from horovod_tune.large_batch import bounds
from horovod_tune.large_batch.accumulation import GradientAccumulator
from horovod_tune.large_batch.batches import BatchSplit, split_batch, steps_per_epoch
from horovod_tune.large_batch.growing.policies import GrowthPolicy
from horovod_tune.large_batch.schedules.scheduler import LargeBatchLR


class BatchGrowth:
    """Grows the global batch of an accumulator and a scheduler as a policy says.

    The batch grows by more passes on each rank; memory and data loading stay as they are. The rate follows by
    the scheduler's rule, and its schedule goes on at the same epoch. A trial that is restored in a world of
    another size goes on with the same global batch, split anew.

    Args:
        policy: Says when.
        accumulator: Its passes grow.
        scheduler: Its rates follow.
        split: What the training starts with.
        num_samples: Of the training set, over all ranks.
        max_global_batch_size: Where growth ends.
        max_micro_batch_size: The most samples of a rank in a pass; by default as many as at the start.
        decay_at_limit: Whether the rate falls by the part of a growth that the limit does not allow (Smith et
            al. 2018, arXiv:1711.00489: first the batch grows, then the rate decays).

    Raises:
        HyperparameterError: The limit is below the batch at the start, or a number is out of bounds.
    """

    def __init__(
        self,
        policy: GrowthPolicy,
        *,
        accumulator: GradientAccumulator,
        scheduler: LargeBatchLR,
        split: BatchSplit,
        num_samples: int,
        max_global_batch_size: int,
        max_micro_batch_size: int | None = None,
        decay_at_limit: bool = False,
    ) -> None:
        bounds.count("num_samples", num_samples)
        bounds.count("max_global_batch_size", max_global_batch_size, split.global_batch_size)
        self.policy = policy
        self.split = split
        self._accumulator, self._scheduler = accumulator, scheduler
        self._num_samples = num_samples
        self._limit = max_global_batch_size
        self._max_micro_batch_size = max_micro_batch_size or split.micro_batch_size
        self._decay_at_limit = decay_at_limit

    def update(self, measure: Any = None) -> bool:
        """Ask the policy, between two optimiser steps, and return whether the batch has grown.

        Args:
            measure: What the policy looks at: a `NoiseEstimate`, an eigenvalue, or None. The same on all
                ranks.
        """
        size = self.split.global_batch_size
        wanted = self.policy.growth(float(self._scheduler.epoch), size, measure)
        bounds.count("growth", wanted)
        factor = min(wanted, self._limit // size)
        if factor > 1:
            self._set(size * factor)
        if self._decay_at_limit and factor < wanted:
            self._scheduler.reduce(factor / wanted)
        return factor > 1

    def state_dict(self) -> dict[str, Any]:
        """Return batch and policy as plain numbers; accumulator and scheduler have their own."""
        return {"global_batch_size": self.split.global_batch_size, "policy": self.policy.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`, in a world of any size; load the scheduler's state before."""
        self.policy.load_state_dict(state_dict["policy"])
        self._set(state_dict["global_batch_size"])

    def _set(self, global_batch_size: int) -> None:
        split = split_batch(global_batch_size, self.split.world_size, self._max_micro_batch_size)
        steps = steps_per_epoch(self._num_samples, global_batch_size)
        self._accumulator.resize(split.passes, split.local_batch_size)
        scheduler = self._scheduler
        if (steps, global_batch_size) != (scheduler.steps_per_epoch, scheduler.global_batch_size):
            changed = None if scheduler.base_batch_size is None else global_batch_size
            scheduler.change_batch(changed, steps_per_epoch=steps)
        self.split = split
