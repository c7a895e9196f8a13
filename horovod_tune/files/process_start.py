"""Distinguishes a process from a later one with the same pid, by its start time."""

from __future__ import annotations

import psutil


def process_start(pid: int) -> float:
    """Return when a process of this host started, in seconds since the host booted.

    A wall-clock time would shift when the clock is set, and the process would be mistaken for another.
    Raises psutil.NoSuchProcess.
    """
    # In this order: older releases of psutil compute the start from the boot time that was read last.
    booted = psutil.boot_time()
    return psutil.Process(pid).create_time() - booted
