"""Reads a compiler's output: how far it is, and what went wrong first. Pure, apart from `Reporter`."""

from __future__ import annotations

import re
import shutil
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import TextIO

_PERCENT = re.compile(r"^\s*\[\s*(\d{1,3})%\]")

# The cause comes first in the log; what follows (make, CMake, setuptools, pip) only says that it failed.
_ERRORS = (
    re.compile(r"^CMake Error"),
    re.compile(r"\b(fatal )?error:(?! subprocess-exited| command )"),
    re.compile(r"\bundefined reference to\b"),
    re.compile(r"^(\S*/)?ld(\.\w+)?: (?!warning)"),
    re.compile(r"\bKilled\b.*\bcc1plus\b|\bcc1plus\b.*\bKilled\b|\bKilled signal terminated program\b"),
    re.compile(r"^(c\+\+|g\+\+|clang\+\+|nvcc).*(No space left on device|not found)"),
    re.compile(r"No space left on device"),
)
_NOT_THE_CAUSE = re.compile(r"^\s*(ERROR: Failed building|error: subprocess-exited-with-error)")


def percent_done(line: str) -> int | None:
    """Return the percentage that a line of CMake's build output states, or None.

    >>> percent_done("[ 42%] Building CXX object horovod/common/common.cc.o")
    42
    >>> percent_done("c++ -DEIGEN_MPL2_ONLY=1 ...") is None
    True
    """
    found = _PERCENT.match(line)
    return min(int(found[1]), 100) if found else None


def first_error(lines: Sequence[str], context: int = 3) -> str | None:
    """Return the first error in a build log with `context` lines after it, or None where there is none."""
    for number, indented in enumerate(lines):
        line = indented.strip()  # pip indents what it passes on
        if _NOT_THE_CAUSE.search(line):
            continue
        if any(pattern.search(line) for pattern in _ERRORS):
            quoted = (text.rstrip()[:400] for text in lines[number : number + 1 + context])
            return textwrap.dedent("\n".join(quoted))
    return None


def ran_out_of_memory(lines: Sequence[str]) -> bool:
    """Tell whether the log says that the kernel or the compiler ran out of memory."""
    marks = ("Killed signal terminated program", "virtual memory exhausted", "out of memory")
    return any(mark in line for line in lines for mark in marks)


class Reporter:
    """Shows a build's progress: one live line on a terminal, a plain line every 10 % elsewhere."""

    def __init__(self, what: str, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._stream = stream
        self._clock = clock
        self._began_s = clock()
        self._live = stream.isatty()
        self._percent = 0
        self._shown = -1
        self._written = ""

    def line(self, text: str) -> None:
        """Take in one line of the build's output."""
        self._percent = max(self._percent, percent_done(text) or 0)
        self.tick()

    def tick(self) -> None:
        """Show how far it is; called for every line and at least once a second."""
        text = f"{self._what}: {self._percent:3d} %  {self._elapsed()}"
        if self._live:
            # A line that wraps could not be written over.
            self._write(f"\r{text[: shutil.get_terminal_size().columns - 1]}\033[K")
        elif self._percent // 10 > self._shown // 10 or self._shown < 0:
            self._write(f"{text}\n")
            self._shown = self._percent

    def done(self, outcome: str) -> None:
        """End the live line."""
        begin = "\r" if self._live else ""
        end = "\033[K\n" if self._live else "\n"
        self._write(f"{begin}{self._what}: {outcome} after {self._elapsed()}{end}")

    def _write(self, text: str) -> None:
        if text != self._written:
            self._stream.write(text)
            self._stream.flush()
            self._written = text

    def _elapsed(self) -> str:
        seconds = int(self._clock() - self._began_s)
        return f"{seconds // 60}:{seconds % 60:02d} min"
