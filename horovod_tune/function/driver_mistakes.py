"""Runs in the driver: finds launchers, and uses of Horovod that make ranks fail or compute wrong results."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from horovod_tune.errors import OutsideTune, SerializationError
from horovod_tune.function.variables import parts_of
from horovod_tune.session.session import RANK_VARIABLE

# The variable that each launcher sets. `horovodrun --mpi` starts Open MPI's mpirun.
_LAUNCHERS = {
    "HOROVOD_SIZE": "horovodrun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "TORCHELASTIC_RUN_ID": "torchrun",
}


def refuse_launcher() -> None:
    """Raise OutsideTune if a launcher has started copies of this program: each would run its own search."""
    if RANK_VARIABLE in os.environ:  # a rank that imports the script
        return
    for name, launcher in _LAUNCHERS.items():
        size = os.environ.get("WORLD_SIZE" if launcher == "torchrun" else name, "1")
        if name in os.environ and size.isdigit() and int(size) > 1:
            raise OutsideTune(
                f"{launcher} has started {size} copies of this program ({name} is set), and each would run a "
                f"whole search in the same folder. Start it once, without {launcher}: "
                f"python {sys.argv[0] or 'tune.py'}. The search starts the ranks of each trial itself: "
                "num_slots sets how many."
            )


def warn_of_horovod_in_driver() -> None:
    """Warn if `hvd.init()` was called in the driver, where `hvd.rank()` is 0 and `hvd.size()` is 1."""
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and horovod.is_initialized():
        warnings.warn(
            "Horovod is initialised in the driver, where hvd.rank() is 0 and hvd.size() is 1. Anything "
            "computed from them outside the training function (samplers, data shards, learning rates) is "
            "wrong in every rank. Move hvd.init() and all that depends on it into the function.",
            stacklevel=2,
        )


def refuse_horovod_of_driver(what: str, parts: Iterable[tuple[str, Any]]) -> None:
    """Raise SerializationError if a `DistributedOptimizer` made in the driver is, or is in, one of the parts.

    Args:
        what: the error's name for what has the parts.
        parts: descriptions of their locations, and the parts.
    """
    for where, part in parts:
        is_small = isinstance(part, dict | list | tuple) and len(part) < 100  # larger ones are data
        for inner, value in [("", part), *(parts_of(part) if is_small else ())]:
            if type(value).__module__ == "horovod.torch.optimizer":
                raise SerializationError(
                    f"{what} uses an hvd.DistributedOptimizer that was made in the driver ({where}{inner}), "
                    "where Horovod has no ranks. Make the model and the optimizer in the training function, "
                    "after hvd.init()."
                )


def used_by(function: Any, depth: int = 4) -> Iterator[tuple[str, Any]]:
    """Yield where and to what a function refers, itself or through other functions of its module."""
    for where, value in parts_of(function):
        yield where, value
        is_ours = getattr(value, "__module__", None) == getattr(function, "__module__", None)
        if depth and isinstance(value, FunctionType | MethodType | partial) and (is_ours or depth == 4):
            yield from used_by(value, depth - 1)
