"""A rank's log: all of its output, or only its beginning and its end if that exceeds `LOG_BYTES`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

# How much of one rank's output a trial keeps.
LOG_BYTES = 16 << 20
# The most bytes of one stream that are read at once, so that both streams fit into the log.
TAKE_BYTES = LOG_BYTES // 2
_RAYS_MARKERS = (b":job_id:", b":task_name:", b":actor_name:")
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


def read_after(
    offsets: Sequence[int], paths: Sequence[str], limit: int = TAKE_BYTES
) -> tuple[bytes, list[int]]:
    """Return what a Ray worker's output files hold after ``offsets``, and the offsets of what comes later.

    Ray's own marker lines are left out. If a file has more than ``limit`` new bytes, only its first and last
    lines are returned.
    """
    parts, ends = [], sizes(paths)
    for path, offset, end in zip(paths, offsets, ends, strict=True):
        start = offset if end >= offset else 0  # Ray has begun a new file
        if end > start:
            parts.append(_read(path, start, end, limit))
    lines = b"".join(parts).splitlines(keepends=True)
    return b"".join(line for line in lines if not line.startswith(_RAYS_MARKERS)), ends


def _read(path: str, start: int, end: int, limit: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(start)
        if end - start <= limit:
            return file.read(end - start)
        half = limit // 2
        head = file.read(half)
        head = head[: head.rfind(b"\n") + 1] or head
        file.seek(end - half - 1)
        tail = file.read(half + 1)
        tail = tail[tail.find(b"\n", 0, -1) + 1 :]
        missing = end - start - len(head) - len(tail)
        return head + left_out(missing) + tail


def sizes(paths: Sequence[str]) -> list[int]:
    return list(map(size_of, paths))


def size_of(path: str) -> int:
    try:
        return os.path.getsize(path)  # 0 for a pipe or a terminal
    except OSError:
        return 0
