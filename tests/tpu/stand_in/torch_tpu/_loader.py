"""What torch_tpu 0.2.0 has under this name: `load`, and the process group `tpu_dist` that it registers."""

from __future__ import annotations

import atexit
import fcntl
import math
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torch_tpu import _device

# torch_tpu raises an error in a process that lacks one of these.
_REQUIRED = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCH_TPU_SLICEBUILDER_ADDRESSES", "TORCH_TPU_TOPOLOGY"),
)
_NO_RUNTIME = "failed to retrieve the PjRt client: "
# The file that this process has locked for its chip, until it ends.
_chip: Any = None


def load() -> None:
    """Register the device and the process group, if this host has TPUs (STAND_IN_CHIPS)."""
    if os.environ.get("STAND_IN_CHIPS") and not dist.is_backend_available("tpu_dist"):
        _device.register()
        dist.Backend.register_backend("tpu_dist", _make_group, devices=["tpu"])
        atexit.register(_shut_down)


def open_chip() -> None:
    """Take this process's chip, as the runtime does.

    Raises:
        RuntimeError: the host has no such chip, another process has it, or the variables describe no slice.
    """
    global _chip
    if _chip is not None:
        return
    if missing := [name for name in _REQUIRED if name not in os.environ]:
        raise RuntimeError(f"missing required environment variables for distributed training: {missing}")
    addresses = os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"].split(",")
    sizes = [int(size) for size in os.environ["TORCH_TPU_TOPOLOGY"].split(",")]
    if len(sizes) < 3 or not math.prod(sizes) == len(addresses) == int(os.environ["WORLD_SIZE"]):
        raise RuntimeError(f"{_NO_RUNTIME}the topology {sizes} does not fit the addresses {addresses}")
    # What Ray has set is overwritten, as torch_tpu does.
    chip = os.environ.get("TPU_VISIBLE_DEVICES", os.environ["LOCAL_RANK"])
    os.environ["TPU_VISIBLE_CHIPS"] = chip
    if not 0 <= int(chip) < int(os.environ["STAND_IN_CHIPS"]):
        raise RuntimeError(f"{_NO_RUNTIME}this host has no chip {chip}")
    path = Path(os.environ["STAND_IN_FOLDER"], f"{os.environ['STAND_IN_HOST']}-{chip}")
    lock = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise RuntimeError(f"{_NO_RUNTIME}chip {chip} is in use") from None
    _chip = lock


def _make_group(store: Any, rank: int, size: int, timeout: Any) -> Any:
    open_chip()
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _shut_down() -> None:
    """Wait for the other ranks of a group that is left, as torch_tpu does when a process ends."""
    if _chip is not None and dist.is_initialized():
        dist.barrier()
