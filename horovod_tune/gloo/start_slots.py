"""Start slots: the trials of one host start one after another, as many at a time as its CPUs allow.

Four trials of two ranks on two CPUs start eight processes that import torch, and four that import Ray Tune.
Started at once, all of them are ready at the end; one after another, the first trial trains while the last
one starts, and nothing takes longer. A process that gets no slot within `SLOT_TIMEOUT_S` starts without one.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

SLOT_TIMEOUT_S = 20.0


class StartSlot:
    """One process's slot. `request` queues up for it; `release`, or the end of the process, frees it.

    Args:
        directory: shared by the processes of this host, and not writable for other users. It holds the
            numbers that put the processes in order and the locks that they wait for; the kernel releases the
            lock of a process that ends.
        queue: the name of the queue.
        at_once: how many processes of the queue hold a slot at a time.
    """

    def __init__(self, directory: Path, queue: str, at_once: int) -> None:
        self._directory = directory
        self._queue = queue
        self._at_once = at_once
        self._released = threading.Event()
        self._granted = threading.Event()

    def request(self) -> StartSlot:
        """Queue up; returns at once."""
        # The kernel serves waiting processes in order only while they wait inside flock().
        threading.Thread(target=self._hold, name="slot", daemon=True).start()
        return self

    def wait(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the slot after `request`; return whether this process holds it."""
        return self._granted.wait(timeout_s)

    def release(self) -> None:
        """Free the slot for the next process, or leave the queue; twice is harmless."""
        self._released.set()

    def _hold(self) -> None:
        place = next_number(self._directory, f"{self._queue}_slots") % self._at_once
        with (self._directory / f"{self._queue}_slot_{place}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._granted.set()
            self._released.wait(SLOT_TIMEOUT_S)


def next_number(directory: Path, name: str) -> int:
    """Return the next value of the counter ``name`` that the processes of this host share; the first is 0."""
    descriptor = os.open(directory / f"{name}_drawn", os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+") as drawn:
        fcntl.flock(drawn, fcntl.LOCK_EX)
        number = int(drawn.read() or 0)
        drawn.seek(0)
        drawn.write(str(number + 1))
    return number


def import_slot(directory: Path) -> StartSlot:
    """Return the slot in which a coordinator imports Ray Tune; half of the CPUs are left to the ranks."""
    return StartSlot(directory, "imports", at_once=max(1, _cpus() // 2))


def start_slot(directory: Path, ranks: int) -> StartSlot:
    """Return the slot in which a trial starts ``ranks`` training actors on this host."""
    return StartSlot(directory, f"starts_of_{ranks}", at_once=max(1, _cpus() // ranks))


def _cpus() -> int:
    return len(os.sched_getaffinity(0))
