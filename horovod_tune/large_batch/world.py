"""Runs in each rank: the ranks of Horovod or torch.distributed, or a single rank if neither is initialised.

Horovod is used only if the training function has already imported it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from horovod_tune import bounds

# Bytes of gradients per collective. Many small collectives are slow; a large one needs a large copy.
PIECE_BYTES = 1 << 26
# By backend: the device of its groups that have no other one.
_DEVICES = {"nccl": "cuda", "tpu_dist": "tpu", "tpu": "tpu"}


def horovod() -> Any | None:
    """Return ``horovod.torch`` if the training function has imported and initialised it, else None."""
    if "horovod.torch" not in sys.modules:
        return None
    import horovod.torch as hvd

    return hvd if hvd.is_initialized() else None


def torch_distributed() -> Any | None:
    """Return ``torch.distributed`` if it is initialised and Horovod is not, else None."""
    dist = torch.distributed
    if horovod() is not None or not dist.is_available() or not dist.is_initialized():
        return None
    if dist.get_backend() == "xla":
        raise bounds.HyperparameterError(
            "horovod_tune.large_batch works with Horovod, Gloo, NCCL and tpu_dist, got torch.distributed's "
            "backend xla"
        )
    return dist


def world_size(process_set: Any = None) -> int:
    """Return the number of ranks of Horovod's process set or torch.distributed's group, by default of all."""
    if (hvd := horovod()) is not None:
        return int((process_set or hvd).size())
    if (dist := torch_distributed()) is not None:
        return int(dist.get_world_size(process_set))
    return 1


def rank(process_set: Any = None) -> int:
    """Return the rank of this process, 0 without Horovod and torch.distributed."""
    if (hvd := horovod()) is not None:
        return int((process_set or hvd).rank())
    if (dist := torch_distributed()) is not None:
        return int(dist.get_rank(process_set))
    return 0


def gather_async(row: Sequence[float], process_set: Any = None) -> Callable[[], list[list[float]]]:
    """Return a function that waits for the rows of all ranks, of one length, and returns them in rank order.

    All ranks get the same, so that they make the same decisions.
    """
    size = world_size(process_set)
    if size == 1:
        return lambda: [[float(value) for value in row]]
    if (hvd := horovod()) is not None:
        options = {} if process_set is None else {"process_set": process_set}
        tensor = torch.tensor([list(row)], dtype=torch.float64)
        handle = hvd.allgather_async(tensor, name="horovod_tune.large_batch.accumulation", **options)
        return lambda: hvd.synchronize(handle).tolist()
    device = _DEVICES.get(torch.distributed.get_backend(process_set), "cpu")
    mine = torch.tensor(list(row), dtype=torch.float64, device=device)
    rows = [torch.empty_like(mine) for _ in range(size)]
    work = torch.distributed.all_gather(rows, mine, group=process_set, async_op=True)
    assert work is not None, "this rank is in the group"

    def wait() -> list[list[float]]:
        work.wait()
        return [each.tolist() for each in rows]

    return wait


def averages(optimizer: Any, size: int, model: torch.nn.Module | None) -> bool:
    """Return True if the optimiser averages over the ranks, False if it or `sum_gradients` sums."""
    hvd = horovod()
    if size == 1 or (hvd is None and torch_distributed() is None):
        return True
    if hvd is None:
        if model is None:
            world = f"a torch.distributed world of {size} ranks"
            raise bounds.HyperparameterError(f"model must be given in {world}, got None")
        kinds = {type(each).__name__ for each in [*model.modules(), *model.parameters()]}
        if sharded := kinds & {"FullyShardedDataParallel", "DTensor"}:
            raise bounds.HyperparameterError(f"model must not be sharded, got one with {sharded.pop()}")
        return False
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


def mean_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Return the mean of a tensor over all ranks."""
    if (size := world_size()) == 1:
        return tensor
    if (hvd := horovod()) is not None:
        return hvd.allreduce(tensor, name="horovod_tune.large_batch.mean", op=hvd.Average)
    torch.distributed.all_reduce(tensor)
    return tensor / size


def sum_gradients(parameters: Sequence[torch.Tensor], group: Any = None) -> None:
    """Sum the gradients over the ranks of torch.distributed; a missing gradient counts as zeros."""
    gradients = []
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        if parameter.grad.is_sparse:
            raise bounds.HyperparameterError(
                "a parameter must have a dense gradient, got a sparse one; use nn.Embedding(sparse=False)"
            )
        gradients.append(parameter.grad)
    starts = itertools.accumulate((each.nbytes for each in gradients), initial=0)
    for _, group_of in itertools.groupby(
        zip(gradients, starts, strict=False),
        lambda pair: (pair[0].dtype, pair[0].device, pair[1] // PIECE_BYTES),
    ):
        piece = [gradient for gradient, _ in group_of]
        flat = torch.cat([gradient.reshape(-1) for gradient in piece])
        torch.distributed.all_reduce(flat, group=group)
        for gradient, total in zip(piece, flat.split([each.numel() for each in piece]), strict=True):
            gradient.copy_(total.view_as(gradient))
