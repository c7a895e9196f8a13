"""Runs in each rank: the Horovod world that this process is in, or a world of one if there is none.

Horovod is not imported for that: a training function that uses it has done so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod_tune.large_batch import bounds


def horovod() -> Any | None:
    """Return ``horovod.torch`` where the training function has imported and initialised it, else None.

    Raises:
        HyperparameterError: The ranks are those of torch.distributed.
    """
    if "horovod.torch" in sys.modules:
        import horovod.torch as hvd

        if hvd.is_initialized():
            return hvd
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise bounds.HyperparameterError(
            "horovod_tune.large_batch knows only Horovod's ranks, got a torch.distributed world of "
            f"{distributed.get_world_size()} ranks: its batch and learning rates would be those of one"
        )
    return None


def world_size(process_set: Any = None) -> int:
    """Return the number of ranks, 1 without Horovod.

    >>> world_size()
    1
    """
    hvd = horovod()
    if hvd is None:
        return 1
    return int(hvd.size() if process_set is None else process_set.size())


def rank(process_set: Any = None) -> int:
    """Return the number of this rank, 0 without Horovod.

    >>> rank()
    0
    """
    hvd = horovod()
    if hvd is None:
        return 0
    return int(hvd.rank() if process_set is None else process_set.rank())


def gather_async(row: Sequence[float], name: str, process_set: Any = None) -> Callable[[], list[list[float]]]:
    """Return a function that waits for the row of every rank and returns them by rank.

    They are the same everywhere, so that no rank decides differently.

    Args:
        row: Numbers, as many on every rank.
        name: Of the collective; one at a time may be under way.
        process_set: The ranks that take part, by default all.

    >>> gather_async([1, 2.5], "losses")()
    [[1.0, 2.5]]
    """
    hvd = horovod()
    if hvd is None or world_size(process_set) == 1:
        rows = [[float(value) for value in row]]
        return lambda: rows
    options = {} if process_set is None else {"process_set": process_set}
    tensor = torch.tensor([list(row)], dtype=torch.float64)
    handle = hvd.allgather_async(tensor, name=f"horovod_tune.large_batch.{name}", **options)
    return lambda: hvd.synchronize(handle).tolist()


def averages(optimizer: Any, size: int) -> bool:
    """Return True if the optimiser averages over the ranks, False if it sums.

    Raises:
        HyperparameterError: It does neither.
    """
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
