"""The patches of Horovod 0.28.1: for current torch, and for how it starts, runs and fails."""

from __future__ import annotations

from horovod_tune.horovod_build.patches.compiling import ANY_FOLDER, CPU_ONLY, CXX17, NO_DEBUG_INFORMATION
from horovod_tune.horovod_build.patches.exchange import GATHER, WAITS_END
from horovod_tune.horovod_build.patches.running import IDLE_CYCLES, STALL_INSPECTOR, WAITING_SLEEPS, ZERO_GRAD
from horovod_tune.horovod_build.patches.starting import GLOO_INTERFACE, INIT_RAISES, ONE_MESH
from horovod_tune.horovod_build.patches.strangers import STRANGERS
from horovod_tune.horovod_build.patching import Patch

# Stands in the built version (``0.28.1+ht7.cpu``); raised whenever a patch below changes.
PATCH_LEVEL = "ht7"


def patches_for(torch_version: tuple[int, int], gpu: str) -> tuple[Patch, ...]:
    """Return the patches of a build against torch `torch_version` (major, minor) with `gpu` operations."""
    chosen: tuple[Patch, ...] = (
        GLOO_INTERFACE,
        *ONE_MESH,
        *STRANGERS,
        *GATHER,
        *WAITS_END,
        *INIT_RAISES,
        *ZERO_GRAD,
        STALL_INSPECTOR,
        *IDLE_CYCLES,
        *WAITING_SLEEPS,
        NO_DEBUG_INFORMATION,
        *ANY_FOLDER,
    )
    if torch_version >= (2, 1):
        chosen = (*CXX17, *chosen)
    if gpu == "none":
        chosen = (*chosen, CPU_ONLY)
    return chosen
