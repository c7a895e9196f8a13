"""Runs in each training actor: what its rank prints, for the trial's log, for errors, and for Ray's log."""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Iterable

from horovod_tune.files import log_files

# How much is read from the rank's pipe at a time.
READ_BYTES = 1 << 16
# How much one call reads, so that a rank which prints without end delays nothing else.
DRAIN_BYTES = 16 << 20
# How much of the end of the output is kept for errors.
TAIL_BYTES = 16_000
# The most lines of the stall inspector's message in an error, the most bytes of it that are kept, and the
# most characters of a line.
STALL_LINES = 30
MESSAGE_BYTES = 16 << 20
LINE_LENGTH = 4096
_STALL_MARK = b"stall_inspector"
# What Horovod prints on the other ranks when a rank is lost. The screen has the trial's error or a line about
# the rank instead; the rank's log keeps it.
_LOST_CONNECTION = re.compile(
    rb"^.*Horovod background loop uncaught exception: \[\S*gloo/transport/.*\n?", re.M
)
# "1: [allreduce.x, allreduce.y]"; "!" marks ranks that the inspector no longer waits for.
_MISSING_RANK = re.compile(r"(\d+)!?: \[(.*)\]")


class RankOutput:
    """What one rank's process, including its C++ libraries, prints through a pipe.

    What the rank prints also goes to this process's standard output, and from there to Ray's log and the
    driver, with ``label`` before each line if it is set. Any thread may call these methods.
    """

    def __init__(self) -> None:
        self.label = b""
        self._pipe, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._pipe, False)
        self._lock = threading.Lock()
        self.is_open = True
        self._new: list[bytes] = []
        self._new_bytes = 0
        self._tail = b""
        # The stall inspector's newest message in this world and what follows it; the start of a line, which
        # may turn out to be a message; and if the newest message has been returned by `awaited_ranks`.
        self._stall, self._line, self._is_new_stall = bytearray(), b"", False

    def fileno(self) -> int:
        return self._pipe

    def drain(self) -> None:
        """Read what the rank has printed so far, but no more than `DRAIN_BYTES`."""
        with self._lock:
            for _ in range(DRAIN_BYTES // READ_BYTES):
                try:
                    data = os.read(self._pipe, READ_BYTES) if self.is_open else b""
                except BlockingIOError:
                    return
                if not data:  # nothing that could print is left
                    self._close()
                    return
                _print(_LOST_CONNECTION.sub(b"", data), self.label)
                self._new.append(data)
                self._new_bytes += len(data)
                if self._new_bytes > 2 * log_files.TAKE_BYTES:
                    self._shorten()
                self._tail = (self._tail + data)[-TAIL_BYTES:]
                self._look_for_stalls(data)

    def _shorten(self) -> None:
        self._new = [log_files.shorten(b"".join(self._new), log_files.TAKE_BYTES)]
        self._new_bytes = len(self._new[0])

    def _look_for_stalls(self, data: bytes) -> None:
        text = self._line + data
        header = text.rfind(_STALL_MARK)
        if header >= 0:
            self._stall, self._is_new_stall = bytearray(text[text.rfind(b"\n", 0, header) + 1 :]), True
        elif self._stall and len(self._stall) < MESSAGE_BYTES:
            self._stall += data
        self._line = text[text.rfind(b"\n") + 1 :][-LINE_LENGTH:]

    def take(self) -> bytes:
        """Return what is new since the last call; of more than `TAKE_BYTES`, the beginning and the end."""
        with self._lock:
            self._shorten()
            (new,), self._new, self._new_bytes = self._new, [], 0
            return new

    def tail(self) -> bytes:
        """Return the end of what the rank has printed."""
        return self._tail

    def forget_stalls(self) -> None:
        """Ignore what Horovod's stall inspector has printed so far, about another world."""
        with self._lock:
            self._stall, self._is_new_stall = bytearray(), False

    def stall_report(self) -> str:
        """Return the last message that Horovod's stall inspector wrote in this world.

        It warns every minute; the message that ends the trial is the last of many.
        """
        return "\n".join(self._newest_stall())

    def awaited_ranks(self) -> dict[int, str]:
        """Return the ranks that the stall inspector newly found missing, with the collectives."""
        is_new, self._is_new_stall = self._is_new_stall, False
        return missing_ranks(self._newest_stall()) if is_new else {}

    def _newest_stall(self) -> list[str]:
        with self._lock:
            recorded = bytes(self._stall)
        first, *others = recorded.decode("utf-8", "replace").splitlines() or [""]
        newest = [first] if first else []
        # Every line of the message begins like one of these; one with "Will shutdown" is the last.
        for line in others:
            if not (line.startswith(("Missing ranks", "One or more rank")) or line[:1].isdigit()):
                break
            newest.append(line[:LINE_LENGTH])
            if "Will shutdown" in line:
                break
        # The last line is kept: it may announce the shutdown.
        return newest if len(newest) <= STALL_LINES else [*newest[: STALL_LINES - 1], newest[-1]]

    def close(self) -> None:
        with self._lock:
            self._close()

    def _close(self) -> None:
        if self.is_open:
            self.is_open = False
            os.close(self._pipe)


def _print(data: bytes, label: bytes) -> None:
    """Write to this process's standard output, which is Ray's log of this actor."""
    if label:
        data = b"".join(label + line + b"\n" for line in data.splitlines())
    with contextlib.suppress(OSError):  # its disk is full: the trial keeps its own log
        while data:
            data = data[os.write(1, data) :]


def missing_ranks(lines: Iterable[str]) -> dict[int, str]:
    """Return the missing ranks in the inspector's message, with the collectives that wait for each."""
    found = map(_MISSING_RANK.fullmatch, lines)
    return {int(each[1]): each[2] for each in found if each is not None}
