"""Distinguishes a process from a later one with the same pid, by its start time."""

from __future__ import annotations

import psutil


def process_start(pid: int) -> float:
    """Return when a process of this host started, in s since the host did.

    A time of the wall clock would move when that clock is set: the process would be taken for another.

    Raises:
        psutil.NoSuchProcess: there is none.
    """
    # In this order: older releases of psutil take the start from the last boot time that was read.
    booted = psutil.boot_time()
    return psutil.Process(pid).create_time() - booted
