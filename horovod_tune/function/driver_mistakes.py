"""Runs in the driver: finds launchers, and uses of Horovod that make ranks fail or compute wrong results."""

from __future__ import annotations

import os
import sys
import warnings

from horovod_tune.errors import OutsideTune
from horovod_tune.session.session import RANK_VARIABLE

# The variable that each launcher sets. `horovodrun --mpi` starts Open MPI's mpirun.
_LAUNCHERS = {
    "HOROVOD_SIZE": "horovodrun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "TORCHELASTIC_RUN_ID": "torchrun",
}

_has_warned = False  # Tune pickles the function more than once


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
    """Warn once if `hvd.init()` was called in the driver, where `hvd.rank()` is 0 and `hvd.size()` is 1."""
    global _has_warned
    horovod = sys.modules.get("horovod.torch")
    # init() sets the ranks of the world, and shutdown() leaves them.
    if horovod is not None and horovod.global_process_set.ranks and not _has_warned:
        _has_warned = True
        warnings.warn(
            "Horovod was initialised in the driver, where hvd.rank() is 0 and hvd.size() is 1. Anything "
            "computed from them outside the training function (samplers, data shards, learning rates) is "
            "wrong in every rank. Move hvd.init() and all that depends on it into the function.",
            stacklevel=2,
        )
