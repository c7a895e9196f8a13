"""Runs in each rank: a global batch in whatever world the rank is in; passes, rate and schedule follow it."""

from __future__ import annotations

from typing import Any

from horovod_tune.large_batch import bounds
from horovod_tune.large_batch.accumulation import GradientAccumulator
from horovod_tune.large_batch.batches import BatchSplit, split_batch, steps_per_epoch
from horovod_tune.large_batch.lr_scheduler import LargeBatchLR

KEEPS = ("global", "local")


class GlobalBatch:
    """Changes accumulator and scheduler together where the batch or the world changes.

    The rate follows the batch by the scheduler's rule, and its schedule continues at the same epoch.

    Args:
        split: What the training starts with, in this world.
        accumulator: Its passes change.
        scheduler: Its rates and the steps of its epochs change.
        num_samples: Of the training set, over all ranks.
        max_micro_batch_size: The most samples of a rank in a pass; by default as many as at the start.
        keep: What a world of another size keeps: the ``global`` batch, by more or fewer passes at the same
            rate, or each rank's ``local`` batch, so that the global batch and the rate change.
        even: Whether a batch that a world does not divide is an error.

    Raises:
        HyperparameterError: A number is out of bounds.
    """

    def __init__(
        self,
        split: BatchSplit,
        *,
        accumulator: GradientAccumulator,
        scheduler: LargeBatchLR,
        num_samples: int,
        max_micro_batch_size: int | None = None,
        keep: str = "global",
        even: bool = True,
    ) -> None:
        self.split = split
        self.keep = bounds.one_of("keep", keep, KEEPS)
        self._accumulator, self.scheduler = accumulator, scheduler
        self._num_samples = bounds.count("num_samples", num_samples)
        self._max_micro_batch_size = max_micro_batch_size or split.micro_batch_size
        self._even = even

    def resize(self, global_batch_size: int) -> None:
        """Go on with another global batch, between two optimiser steps."""
        self._share(global_batch_size, self.split.world_size)

    def follow_world(self) -> None:
        """Go on in a world that has changed its size in this process, as under ``hvd.elastic.run``.

        Every rank calls it. A group of passes that was under way is dropped.

        Raises:
            HyperparameterError: `even`, and the new world does not divide the batch; or Horovod's optimiser
                was made in a world of one rank, in which it prepares no average.
        """
        world = self._accumulator.restart()
        before = self.split
        self._share(self._in_world(before.global_batch_size, before.world_size, world), world)

    def state_dict(self) -> dict[str, Any]:
        """Return the batch as plain numbers; accumulator and scheduler have states of their own."""
        return {"global_batch_size": self.split.global_batch_size, "world_size": self.split.world_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`, in a world of any size; load the scheduler's state before."""
        size, world = state_dict["global_batch_size"], state_dict["world_size"]
        self.resize(self._in_world(size, world, self.split.world_size))

    def _share(self, global_batch_size: int, world_size: int) -> None:
        split = split_batch(global_batch_size, world_size, self._max_micro_batch_size, even=self._even)
        steps = steps_per_epoch(self._num_samples, global_batch_size)
        self._accumulator.resize(split.passes, split.local_batch_size)
        scheduler = self.scheduler
        if (steps, global_batch_size) != (scheduler.steps_per_epoch, scheduler.global_batch_size):
            changed = None if scheduler.base_batch_size is None else global_batch_size
            scheduler.change_batch(changed, steps_per_epoch=steps)
        self.split = split

    def _in_world(self, global_batch_size: int, world_size: int, new_world_size: int) -> int:
        if self.keep == "global":
            return global_batch_size
        return global_batch_size // world_size * new_world_size
