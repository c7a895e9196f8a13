"""A global batch as what each rank does for it: a local batch, in one pass or in several."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from horovod_tune.large_batch import bounds


@dataclass(frozen=True)
class BatchSplit:
    """How a world works through one global batch.

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
        """Samples of a rank in an optimiser step; on some one less, where the world does not divide them."""
        return -(-self.global_batch_size // self.world_size)


def split_batch(
    global_batch_size: int, world_size: int, max_micro_batch_size: int | None = None, *, even: bool = True
) -> BatchSplit:
    """Return the fewest passes, as equal as can be, that make up a global batch in a world of any size.

    A configuration with ``global_batch_size=4096`` so means the same on 2 ranks as on 64.

    Args:
        global_batch_size: Samples in an optimiser step, over all ranks.
        world_size: Ranks.
        max_micro_batch_size: The most samples that a rank takes in a pass, for its memory; by default as many
            as there are.
        even: Whether all ranks must have as many samples. Without, some have one less, for worlds that
            change their size; `GradientAccumulator` weighs each sample alike.

    Raises:
        HyperparameterError: A number is below 1, or `world_size` does not divide `global_batch_size`.

    >>> split_batch(4096, 8, max_micro_batch_size=128)
    BatchSplit(global_batch_size=4096, world_size=8, passes=4, micro_batch_size=128)
    >>> split_batch(4096, 6)
    Traceback (most recent call last):
    horovod_tune.large_batch.bounds.HyperparameterError: global_batch_size must be a multiple of the world \
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
    """Give, for each optimiser step of an epoch, the indices of each pass of this rank.

    The samples of a step are those of one rank with the whole batch. The last step may be smaller; it may
    leave a rank with fewer passes, or with none.

    Args:
        order: Indices of the training samples, shape (samples,), the same on every rank.
        split: What `split_batch` returned.
        rank: This rank.

    Raises:
        HyperparameterError: `order` is no such tensor, or there is no such `rank`.

    >>> order = torch.arange(10)
    >>> for passes in rank_passes(order, split_batch(8, 2, max_micro_batch_size=2), rank=1):
    ...     print([rows.tolist() for rows in passes])
    [[1, 3], [5, 7]]
    [[9]]
    """
    if not 0 <= bounds.count("rank", rank, 0) < split.world_size:
        raise bounds.HyperparameterError(
            f"rank must be less than the world size {split.world_size}, got {rank}"
        )
    if not isinstance(order, torch.Tensor) or order.dim() != 1:
        shape = f" of shape {tuple(order.shape)}" if hasattr(order, "shape") else ""
        raise bounds.HyperparameterError(
            f"order must be a tensor of indices, shape (samples,), got {type(order).__name__}{shape}; "
            "torch.as_tensor makes one of a list or an array"
        )
    for batch in order.split(split.global_batch_size):
        mine = batch[rank :: split.world_size]
        yield list(mine.split(split.micro_batch_size)) if len(mine) else []


def steps_per_epoch(num_samples: int, global_batch_size: int, *, drop_last: bool = False) -> int:
    """Return the optimiser steps in an epoch.

    Args:
        num_samples: Samples of the training set, over all ranks.
        global_batch_size: Samples in an optimiser step, over all ranks.
        drop_last: Whether a last batch that is not full is left out.

    Raises:
        HyperparameterError: A number is below 1, or no batch is full and `drop_last` leaves none.

    >>> steps_per_epoch(1000, 128), steps_per_epoch(1000, 128, drop_last=True)
    (8, 7)
    """
    num_samples = bounds.count("num_samples", num_samples)
    global_batch_size = bounds.count("global_batch_size", global_batch_size)
    if drop_last and global_batch_size > num_samples:
        raise bounds.HyperparameterError(
            f"global_batch_size must be at most num_samples ({num_samples}) with drop_last, "
            f"got {global_batch_size}"
        )
    return num_samples // global_batch_size if drop_last else -(-num_samples // global_batch_size)
