"""Runs in each rank: its part of a global batch, in one pass or several, in a world of any size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from horovod_tune import bounds
from horovod_tune.large_batch.accumulation import GradientAccumulator
from horovod_tune.large_batch.lr_scheduler import LargeBatchLR


@dataclass(frozen=True)
class BatchSplit:
    """The passes in which a world processes one global batch.

    Attributes:
        global_batch_size: Samples in an optimiser step.
        world_size: Ranks.
        passes: Forward and backward passes of a rank in an optimiser step.
        micro_batch_size: Samples of a rank in a pass; the last pass of a step may have fewer.
    """

    global_batch_size: int
    world_size: int
    passes: int
    micro_batch_size: int

    @property
    def local_batch_size(self) -> int:
        """Samples of a rank in an optimiser step; some ranks have one less if the split is uneven."""
        return -(-self.global_batch_size // self.world_size)


def split_batch(
    global_batch_size: int, world_size: int, max_micro_batch_size: int | None = None, *, even: bool = True
) -> BatchSplit:
    """Return the fewest passes, as equal as possible, that make up a global batch in a world of any size.

    Args:
        global_batch_size: Samples in an optimiser step, over all ranks.
        world_size: Ranks.
        max_micro_batch_size: The most samples that fit into a rank's memory in one pass; by default, there
            is no limit.
        even: If True, all ranks must have the same number of samples. If False, any world size is allowed,
            and some ranks may have one less; `GradientAccumulator` weights each sample equally.

    >>> split_batch(4096, 8, max_micro_batch_size=128)
    BatchSplit(global_batch_size=4096, world_size=8, passes=4, micro_batch_size=128)
    >>> split_batch(4096, 6)
    Traceback (most recent call last):
    horovod_tune.bounds.HyperparameterError: global_batch_size must be a multiple of the world \
size 6, such as 4092 or 4098, got 4096
    >>> split_batch(4096, 6, even=False).local_batch_size
    683
    """
    global_batch_size = bounds.count("global_batch_size", global_batch_size)
    world_size = bounds.count("world_size", world_size)
    local, rest = divmod(global_batch_size, world_size)
    if rest and even:
        below = f"{global_batch_size - rest} or " if local else ""
        raise bounds.HyperparameterError(
            f"global_batch_size must be a multiple of the world size {world_size}, such as "
            f"{below}{(local + 1) * world_size}, got {global_batch_size}"
        )
    local += rest > 0
    if max_micro_batch_size is None:
        max_micro_batch_size = local
    passes = -(-local // bounds.count("max_micro_batch_size", max_micro_batch_size))
    return BatchSplit(global_batch_size, world_size, passes, -(-local // passes))


def rank_passes(order: torch.Tensor, split: BatchSplit, rank: int = 0) -> Iterator[list[torch.Tensor]]:
    """Yield, for each optimiser step of an epoch, the indices of each pass of this rank.

    All ranks together process the same samples in a step as a single rank would with the whole batch. The
    last step may be smaller; it may leave a rank with fewer passes, or with none.

    Args:
        order: Indices of the training samples, shape (samples,), the same on every rank.
        split: What `split_batch` returned.
        rank: This rank.

    >>> order = torch.arange(10)
    >>> for passes in rank_passes(order, split_batch(8, 2, max_micro_batch_size=2), rank=1):
    ...     print([rows.tolist() for rows in passes])
    [[1, 3], [5, 7]]
    [[9]]
    """
    world_size = split.world_size
    if bounds.count("rank", rank, 0) >= world_size:
        raise bounds.HyperparameterError(f"rank must be less than the world size {world_size}, got {rank}")
    if not isinstance(order, torch.Tensor) or order.dim() != 1:
        shape = f" of shape {tuple(order.shape)}" if hasattr(order, "shape") else ""
        raise bounds.HyperparameterError(
            f"order must be a tensor of indices, shape (samples,), got {type(order).__name__}{shape}; "
            "torch.as_tensor converts a list or an array"
        )
    for batch in order.split(split.global_batch_size):
        mine = batch[rank::world_size]
        yield list(mine.split(split.micro_batch_size)) if len(mine) else []


def steps_per_epoch(num_samples: int, global_batch_size: int) -> int:
    """Return the number of optimiser steps in an epoch; the last step may have fewer samples.

    Args:
        num_samples: Samples of the training set, over all ranks.
        global_batch_size: Samples in an optimiser step, over all ranks.

    >>> steps_per_epoch(1000, 128)
    8
    """
    num_samples = bounds.count("num_samples", num_samples)
    return -(-num_samples // bounds.count("global_batch_size", global_batch_size))


class GlobalBatch:
    """Adjusts an accumulator and a scheduler when the global batch or the number of ranks changes.

    Args:
        split: The split that the training starts with, in this world.
        accumulator: Its passes change.
        scheduler: Its rates and steps per epoch change.
        num_samples: Samples in the training set, over all ranks.
        max_micro_batch_size: The most samples of a rank in a pass; by default ``split.micro_batch_size``.
        keep: What to keep when the number of ranks changes: ``global`` keeps the global batch and the rate,
            in more or fewer passes; ``local`` keeps each rank's batch, so the global batch and rate change.
        even: If True, a global batch that is not a multiple of the number of ranks is an error.
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
        self.keep = bounds.one_of("keep", keep, ("global", "local"))
        self._accumulator, self.scheduler = accumulator, scheduler
        self._num_samples = bounds.count("num_samples", num_samples)
        largest = split.micro_batch_size if max_micro_batch_size is None else max_micro_batch_size
        self._max_micro_batch_size = bounds.count("max_micro_batch_size", largest)
        self._even = even

    def resize(self, global_batch_size: int) -> None:
        """Continue with another global batch, between two optimiser steps."""
        self._share(global_batch_size, self.split.world_size)

    def follow_world(self) -> None:
        """Continue in a world that has changed its size in this process, as under ``hvd.elastic.run``.

        Every rank must call it. An unfinished group of passes is discarded.

        Raises:
            HyperparameterError: `even` is True and the new world size does not divide the batch; or Horovod's
                optimiser was made in a world of one rank, for which it prepares no average.
        """
        world_size = self._accumulator.restart()
        self._continue(self.split.global_batch_size, self.split.world_size, world_size)

    def state_dict(self) -> dict[str, Any]:
        """Return the batch as plain numbers; accumulator and scheduler have states of their own."""
        return {"global_batch_size": self.split.global_batch_size, "world_size": self.split.world_size}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict`, in a world of any size; load the scheduler's state first."""
        self._continue(state_dict["global_batch_size"], state_dict["world_size"], self.split.world_size)

    def _share(self, global_batch_size: int, world_size: int) -> None:
        split = split_batch(global_batch_size, world_size, self._max_micro_batch_size, even=self._even)
        steps = steps_per_epoch(self._num_samples, global_batch_size)
        self._accumulator.resize(split.passes, split.local_batch_size)
        changed = None if self.scheduler.base_batch_size is None else global_batch_size
        self.scheduler.change_batch(changed, steps_per_epoch=steps)
        self.split = split

    def _continue(self, global_batch_size: int, world_size: int, new_world_size: int) -> None:
        if self.keep == "local":
            global_batch_size = global_batch_size // world_size * new_world_size
        self._share(global_batch_size, new_world_size)
