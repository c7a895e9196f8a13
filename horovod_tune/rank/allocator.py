"""Keeps the memory that a training step frees in the rank's process, so that the next step reuses it.

glibc returns free memory at the end of a heap, and freed large blocks, to the kernel immediately. A training
step frees all that it took. Depending on the heap's layout, up to a thousand pages per step are returned,
requested again and zeroed by the kernel, which takes a fifth of a small network's training time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

# By environment variable: the parameter of glibc's `mallopt`, and its value in bytes.
SETTINGS = {
    # Free memory at the end of a heap is kept up to this size.
    "MALLOC_TRIM_THRESHOLD_": (-1, 256 << 20),
    # As large as the heap of a thread, so that empty heaps are kept too. Untouched padding uses no memory.
    "MALLOC_TOP_PAD_": (-2, 64 << 20),
    # The largest value that glibc accepts. Larger blocks come from the kernel and go back to it.
    "MALLOC_MMAP_THRESHOLD_": (-3, 32 << 20),
}


def keep_freed_memory() -> bool:
    """Configure this process's allocator; return False if it is not glibc's or the user has configured it."""
    mallopt = _of_libc("mallopt")
    if mallopt is None or is_set_by_user(os.environ):
        return False
    return all([mallopt(parameter, value) for parameter, value in SETTINGS.values()])


def is_set_by_user(environment: Mapping[str, str]) -> bool:
    """Return True if ``environment`` configures glibc's allocator."""
    variables = (*SETTINGS, "MALLOC_MMAP_MAX_")
    tunables = environment.get("GLIBC_TUNABLES", "")
    return any(name in environment for name in variables) or "glibc.malloc." in tunables


def _of_libc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None)
