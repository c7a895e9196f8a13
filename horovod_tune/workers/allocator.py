"""Lets a rank keep the memory that training frees and wants again at the next step.

glibc gives memory at the end of a heap back to the kernel as soon as it is free, and large blocks at once. A
training step frees all that it took, so that by the chance of the heap's layout up to a thousand pages a step
are given back, wanted again and filled with zeros by the kernel: a fifth of a small network's time.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

_OPTIONS = {
    # M_TRIM_THRESHOLD: what is free at the end of a heap stays.
    -1: 256 << 20,
    # M_TOP_PAD: as large as the heap of a thread, so that empty heaps stay too. Not touched, it is no memory.
    -2: 64 << 20,
    # M_MMAP_THRESHOLD: the most that glibc takes. Larger blocks come from the kernel and go back to it.
    -3: 32 << 20,
}
"""By glibc's numbers for mallopt()."""

_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


def keep_freed_memory() -> bool:
    """Set this process's allocator; return False where it is not glibc's, or the user has set it himself."""
    mallopt = _of_libc("mallopt")
    if mallopt is None or is_set_by_user(os.environ):
        return False
    return all([mallopt(option, value) for option, value in _OPTIONS.items()])


def give_freed_memory_back() -> None:
    """Return to the kernel what is free, between two trials; up to 64 MB a heap stay for the next one."""
    trim = _of_libc("malloc_trim")
    if trim is not None:
        trim(0)


def is_set_by_user(environment: Mapping[str, str]) -> bool:
    """Whether ``environment`` says how glibc is to allocate."""
    return any(name in environment for name in _VARIABLES) or "glibc.malloc." in environment.get(
        "GLIBC_TUNABLES", ""
    )


def _of_libc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None)
