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
    streams = {"sys.stdout": sys.stdout, "sys.stderr": sys.stderr}
    return [name for name, stream in streams.items() if not is_usable(stream)]


def is_usable(stream: Any) -> bool:
    """Return True if a stream exists and is open.

    >>> import io
    >>> text = io.TextIOWrapper(io.BytesIO())
    >>> was_usable, _ = is_usable(text), text.detach()
    >>> was_usable, is_usable(text), is_usable(None)
    (True, False, False)
    """
    try:
        # The function may have installed an object without this attribute.
        return stream is not None and not getattr(stream, "closed", False)
    except ValueError:  # its buffer was detached
        return False
