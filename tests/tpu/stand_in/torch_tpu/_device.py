"""Tensors on a device "tpu" whose memory is the CPU's.

As torch_tpu does, this uses PyTorch's key for the devices of other packages (PrivateUse1): every operation on
such a tensor, also one of DDP's in C++, gets here, and is done on the tensor in the CPU's memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_KERNELS = torch.library.Library("aten", "IMPL")


class TpuTensor(torch.Tensor):
    """A tensor on "tpu"; ``memory`` is the tensor in the CPU's memory."""

    memory: torch.Tensor

    @staticmethod
    def __new__(cls, memory: torch.Tensor) -> TpuTensor:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            memory.size(),
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device="tpu:0",
        )
        made.memory = memory
        return made

    def __repr__(self, **_: Any) -> str:
        return f"{self.memory!r} on tpu"

    def tolist(self) -> Any:
        return self.memory.tolist()  # torch has none for subclasses

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            return _collective(func.overloadpacket.__name__, args)
        kwargs = kwargs or {}
        known = {}

        def unwrap(value: Any) -> Any:
            if isinstance(value, TpuTensor):
                known[id(value.memory)] = value
                return value.memory
            if isinstance(value, torch.Tensor):
                known[id(value)] = value  # one on the CPU, which may be returned
            return torch.device("cpu") if isinstance(value, torch.device) else value

        target = kwargs.get("device")
        leaves = target is not None and torch.device(target).type != "tpu"

        def wrap(value: Any) -> Any:
            if leaves or not isinstance(value, torch.Tensor):
                return value
            return known[id(value)] if id(value) in known else TpuTensor(value)

        return tree_map(wrap, func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs)))


def _collective(name: str, args: Any) -> Any:
    """Do an operation of torch.distributed with the group's backend for "tpu"; return what it returns."""
    # Its arguments are tensors, the group, and options.
    place = next(i for i, each in enumerate(args) if isinstance(each, torch.ScriptObject))
    backend = dist.ProcessGroup.unbox(args[place])._get_backend(torch.device("tpu"))
    tensors = [tree_map(lambda each: each.memory, each) for each in args[:place]]
    match name:
        case "allreduce_":
            options = c10d.AllreduceOptions()
            options.reduceOp = dist.ReduceOp.RedOpType(args[2].op())
            work = backend.allreduce(*tensors, options)
        case "broadcast_":
            options = c10d.BroadcastOptions()
            options.rootRank, options.rootTensor = args[2:4]
            work = backend.broadcast(*tensors, options)
        case "allgather_":
            work = backend.allgather(*tensors)
        case "barrier":
            return backend.barrier().boxed()
        case _:
            raise NotImplementedError(f"the stand-in has no {name}")
    return args[0], work.boxed()


def register() -> None:
    """Make "tpu" a device of torch's."""
    _setup_privateuseone_for_python_backend("tpu")

    def empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> TpuTensor:
        return TpuTensor(torch.empty(size, dtype=dtype, memory_format=memory_format))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> TpuTensor:
        return TpuTensor(torch.empty_strided(size, stride, dtype=dtype))

    def copy(source: Any, target: Any, non_blocking: bool = False) -> Any:
        """Called where torch does not dispatch to Python, as in `torch.tensor(..., device="tpu")`."""
        memories = [each.memory if isinstance(each, TpuTensor) else each for each in (source, target)]
        memories[1].copy_(memories[0])
        return target

    _KERNELS.impl("_copy_from", copy, "PrivateUse1")
    _KERNELS.impl("empty.memory_format", empty, "PrivateUse1")
    _KERNELS.impl("empty_strided", empty_strided, "PrivateUse1")
