"""Trials of one host start in turns, as many at once as there are CPUs for their ranks.

Four trials of two ranks on two CPUs want eight new processes with torch in each, and four times Ray Tune. All
at once they are all ready at the end; in turns the first trial trains while the last one starts, and nothing
is slower. A turn is a courtesy: one that does not come within `TURN_S` is not waited for.
"""

from __future__ import annotations

import fcntl
import os
import threading
from pathlib import Path

TURN_S = 20.0


class Turn:
    """One process's turn: asked for with `ask`, given to the next one by `end` or the end of the process.

    ``directory`` is one that the processes of this host share and others cannot write to. A number drawn from
    a file in it says after whom the turn comes, and a lock that the kernel takes back says when. ``queue``
    names those among whom it comes, ``at_once`` of them at a time.
    """

    def __init__(self, directory: Path, queue: str, at_once: int) -> None:
        self._directory = directory
        self._queue = queue
        self._at_once = at_once
        self._over = threading.Event()
        self._has_it = threading.Event()

    def ask(self) -> Turn:
        """Queue up for the turn; returns at once."""
        # The kernel serves those who wait in their order only if they wait inside flock().
        threading.Thread(target=self._hold, name="turn", daemon=True).start()
        return self

    def comes_within(self, timeout_s: float) -> bool:
        """Whether the turn has come, or comes within ``timeout_s`` of now; after `ask`."""
        return self._has_it.wait(timeout_s)

    def end(self) -> None:
        """Give the turn to the next process, also if it has not come yet; twice is harmless."""
        self._over.set()

    def _hold(self) -> None:
        place = draw(self._directory, f"{self._queue}_turns") % self._at_once
        with (self._directory / f"{self._queue}_turn_{place}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._has_it.set()
            self._over.wait(TURN_S)


def draw(directory: Path, name: str) -> int:
    """Return the next number of those that the processes of this host draw under ``name``; the first is 0."""
    descriptor = os.open(directory / f"{name}_drawn", os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+") as drawn:
        fcntl.flock(drawn, fcntl.LOCK_EX)
        number = int(drawn.read() or 0)
        drawn.seek(0)
        drawn.write(str(number + 1))
    return number


def imports_turn(directory: Path) -> Turn:
    """Return the turn of a coordinator to import Ray Tune. Half of the CPUs are left to the ranks."""
    return Turn(directory, "imports", at_once=max(1, _cpus() // 2))


def starts_turn(directory: Path, ranks: int) -> Turn:
    """Return the turn of a trial that starts ``ranks`` training actors on this host; until they are ready."""
    return Turn(directory, f"starts_of_{ranks}", at_once=max(1, _cpus() // ranks))


def _cpus() -> int:
    return len(os.sched_getaffinity(0))
