"""The patches of Horovod 0.28.1: they support current torch, and change how Horovod starts, runs and fails.

Each is a `.patch` file in this folder, in the format of `diff -u`; its first lines say why it is needed.
"""

from __future__ import annotations

from pathlib import Path

# Part of the built version (``0.28.1+ht7.cpu``); raised whenever a patch changes.
PATCH_LEVEL = "ht7"


def patches_for(torch_version: tuple[int, int], gpu: str) -> list[Path]:
    """Return the patches for a build against torch `torch_version` (major, minor) with `gpu` operations."""
    standard = "cxx20" if torch_version >= (2, 14) else "cxx17"
    names = [standard, "starting", "authentication", "exchange", "running", "compiling"]
    if gpu == "none":
        names.append("cpu_only")
    return [Path(__file__).with_name(f"{name}.patch") for name in names]
