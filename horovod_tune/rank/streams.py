"""Runs in each rank: its ``sys.stdout`` and ``sys.stderr``, which the training function may replace."""

from __future__ import annotations

import contextlib
import sys
from typing import Any


def flush_streams() -> None:
    """Flush what was printed, as far as the streams allow."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # any: it may be closed, full, or have no such method
            stream.flush()


def unusable_streams() -> list[str]:
    """Return the names of the process's streams that nothing can be printed to any more.

    >>> unusable_streams()
    []
    """
    return [name for name in ("stdout", "stderr") if not _is_usable(getattr(sys, name))]


def _is_usable(stream: Any) -> bool:
    try:
        # The function may have installed an object without this attribute.
        return stream is not None and not getattr(stream, "closed", False)
    except ValueError:  # its buffer was detached
        return False
