"""A look at the processes of TPU trials."""

from __future__ import annotations

import time

import psutil


def rank_processes() -> list[psutil.Process]:
    """Return the ranks of this process's own Ray session, and their parents."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if any("horovod_tune.xla.parent" in part for part in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def see_them_gone(processes: list[psutil.Process], *, within_s: float = 20.0) -> None:
    end = time.monotonic() + within_s
    while left := [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < end, f"still there: {left}"
        time.sleep(0.1)
