"""A rank's log: all of its output, or only its beginning and its end if that exceeds `LOG_BYTES`."""

from __future__ import annotations

import os
import re
from pathlib import Path

# How much of one rank's output a trial keeps.
LOG_BYTES = 16 << 20
# The most bytes of one stream that are read at once, so that both streams fit into the log.
TAKE_BYTES = LOG_BYTES // 2
_LEFT_OUT = re.compile(rb"\[horovod_tune: (\d+) bytes of this log are left out here\]\n")
# More than that line has.
_MARKER_BYTES = 100


def left_out(count: int) -> bytes:
    """Return the line that replaces ``count`` missing bytes of a log."""
    return b"[horovod_tune: %d bytes of this log are left out here]\n" % count


def shorten(text: bytes, limit: int) -> bytes:
    """Return the first and the last lines of ``text``, ``limit`` bytes in all, around a `left_out` line.

    That line also counts the bytes that earlier calls left out.

    >>> print(shorten(b"one" + b"\\n" + b"-" * 90 + b"\\n" + b"two" + b"\\n", 10).decode(), end="")
    one
    [horovod_tune: 91 bytes of this log are left out here]
    two
    """
    if len(text) <= limit:
        return text
    half = limit // 2
    end = text.rfind(b"\n", 0, half) + 1 or half
    start = text.find(b"\n", len(text) - half - 1, len(text) - 1) + 1 or len(text) - half
    if cut_before := _LEFT_OUT.search(text, 0, end + _MARKER_BYTES):
        end = min(end, cut_before.start())
    count = start - end
    for earlier in _LEFT_OUT.finditer(text, end, start):
        count += int(earlier[1]) - len(earlier[0])
    return text[:end] + left_out(count) + text[start:]


def append(path: Path, text: bytes, *, limit: int = LOG_BYTES) -> None:
    """Append to a log; one that exceeds ``limit`` bytes is cut to half of that, so that this is rare."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size + len(text) <= limit:
            file.write(text)
            return
        file.seek(0)
        short = shorten(file.read() + text, limit // 2)
        file.truncate(0)
        file.write(short)
