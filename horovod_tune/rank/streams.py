"""Runs in each rank: its ``sys.stdout`` and ``sys.stderr``, which the training function may replace."""

from __future__ import annotations

import contextlib
import sys


def flush_streams() -> None:
    """Flush what was printed, as far as the streams allow."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # any: it may be closed, full, or have no such method
            stream.flush()
