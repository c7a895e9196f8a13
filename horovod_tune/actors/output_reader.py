"""Runs in each training actor: reads what its process prints, for the trial's log and for stall errors."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Sequence

from horovod_tune.files import log_files
from horovod_tune.rank.streams import flush_streams
from horovod_tune.ray_compat import queries

# The most lines of the stall inspector's message in an error.
STALL_LINES = 30
# How much of stderr's end is searched for that message, and the limits of the message and of each line.
SEARCHED_BYTES = 64 << 20
MESSAGE_BYTES = 16 << 20
LINE_LENGTH = 4096
# "1: [allreduce.x, allreduce.y]"; "!" marks ranks that the inspector no longer waits for.
_MISSING_RANK = re.compile(r"(\d+)!?: \[(.*)\]")


class OutputReader:
    """Reads what this process, including its C++ libraries, has printed since the last `take`.

    Ray gives each worker process a file for stdout and one for stderr; reading them costs the training
    function nothing and needs neither a pipe nor a thread.
    """

    def __init__(self, paths: Sequence[str] | None = None) -> None:  # tests give other files
        links = [f"/proc/self/fd/{number}" for number in (1, 2)]
        self.paths = paths or queries.rotated_output() or [os.readlink(link) for link in links]
        self.offsets = log_files.sizes(self.paths)
        self._stderr_mark = self.offsets[1]
        self._awaited_mark: int | None = None
        self._taking = threading.Lock()

    def mark(self) -> None:
        """Skip what was printed so far, by the previous trial."""
        flush_streams()
        self.offsets = log_files.sizes(self.paths)
        self.forget_stalls()

    def forget_stalls(self) -> None:
        """Ignore what Horovod's stall inspector has printed so far, about another world."""
        self._stderr_mark, self._awaited_mark = log_files.size_of(self.paths[1]), None

    def take(self, limit: int = log_files.TAKE_BYTES) -> bytes:
        """Return new output, as `log_files.read_after`."""
        flush_streams()
        with self._taking:
            text, self.offsets = log_files.read_after(self.offsets, self.paths, limit)
        return text

    def stall_report(self) -> str:
        """Return the last message that Horovod's stall inspector wrote to stderr in this world.

        It warns every minute; the message that ends the trial is the last of many.
        """
        return "\n".join(self._newest_stall(self._stderr_mark))

    def awaited_ranks(self) -> dict[int, str]:
        """Return the ranks that the stall inspector found missing since the last call, with the collectives.

        The first call of a trial returns nothing, since messages before it may be of any age.
        """
        mark, self._awaited_mark = self._awaited_mark, log_files.size_of(self.paths[1])
        if mark is None:
            return {}
        return missing_ranks(self._newest_stall(mark))

    def _newest_stall(self, start: int) -> list[str]:
        """Return the lines of the inspector's last message after the offset ``start``."""
        size = log_files.size_of(self.paths[1])
        if size == start:
            return []
        if size < start:  # Ray has begun a new file
            start = 0
        with open(self.paths[1], "rb") as file:
            file.seek(max(start, size - SEARCHED_BYTES))
            printed = file.read()
        header = printed.rfind(b"stall_inspector")
        if header < 0:
            return []
        begin = printed.rfind(b"\n", 0, header) + 1
        first, *others = printed[begin : begin + MESSAGE_BYTES].decode("utf-8", "replace").splitlines()
        newest = [first]
        # Every line of the message begins like one of these; one with "Will shutdown" is the last.
        for line in others:
            if not (line.startswith(("Missing ranks", "One or more rank")) or line[:1].isdigit()):
                break
            newest.append(line[:LINE_LENGTH])
            if "Will shutdown" in line:
                break
        # The last line is kept: it may announce the shutdown.
        return newest if len(newest) <= STALL_LINES else [*newest[: STALL_LINES - 1], newest[-1]]


def missing_ranks(lines: Iterable[str]) -> dict[int, str]:
    """Return the missing ranks in the inspector's message, with the collectives that wait for each."""
    found = map(_MISSING_RANK.fullmatch, lines)
    return {int(each[1]): each[2] for each in found if each is not None}
