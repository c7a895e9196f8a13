"""Trials of one host start in slots, as many at once as there are CPUs for their ranks.

Four trials of two ranks on two CPUs want eight new processes with torch in each, and four times Ray Tune. All
at once they are all ready at the end; in slots the first trial trains while the last one starts, and nothing
is slower. A slot is a courtesy: one that does not come within `SLOT_TIMEOUT_S` is not waited for.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

SLOT_TIMEOUT_S = 20.0


class StartSlot:
    """One process's slot: asked for with `request`, given to the next one by `release` or the end of the process.

    ``directory`` is one that the processes of this host share and others cannot write to. A number drawn from
    a file in it says after whom the slot comes, and a lock that the kernel takes back says when. ``queue``
    names those among whom it comes, ``at_once`` of them at a time.
    """

    def __init__(self, directory: Path, queue: str, at_once: int) -> None:
        self._directory = directory
        self._queue = queue
        self._at_once = at_once
        self._released = threading.Event()
        self._granted = threading.Event()

    def request(self) -> StartSlot:
        """Queue up for the slot; returns at once."""
        # The kernel serves those who wait in their order only if they wait inside flock().
        threading.Thread(target=self._hold, name="slot", daemon=True).start()
        return self

    def wait(self, timeout_s: float) -> bool:
        """Whether the slot has come, or comes within ``timeout_s`` of now; after `request`."""
        return self._granted.wait(timeout_s)

    def release(self) -> None:
        """Give the slot to the next process, also if it has not come yet; twice is harmless."""
        self._released.set()

    def _hold(self) -> None:
        place = next_number(self._directory, f"{self._queue}_slots") % self._at_once
        with (self._directory / f"{self._queue}_slot_{place}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._granted.set()
            self._released.wait(SLOT_TIMEOUT_S)


def next_number(directory: Path, name: str) -> int:
    """Return the next number of those that the processes of this host next_number under ``name``; the first is 0."""
    descriptor = os.open(directory / f"{name}_drawn", os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+") as drawn:
        fcntl.flock(drawn, fcntl.LOCK_EX)
        number = int(drawn.read() or 0)
        drawn.seek(0)
        drawn.write(str(number + 1))
    return number


def import_slot(directory: Path) -> StartSlot:
    """Return the slot of a coordinator to import Ray Tune. Half of the CPUs are left to the ranks."""
    return StartSlot(directory, "imports", at_once=max(1, _cpus() // 2))


def start_slot(directory: Path, ranks: int) -> StartSlot:
    """Return the slot of a trial that starts ``ranks`` training actors on this host; until they are ready."""
    return StartSlot(directory, f"starts_of_{ranks}", at_once=max(1, _cpus() // ranks))


def _cpus() -> int:
    return len(os.sched_getaffinity(0))
