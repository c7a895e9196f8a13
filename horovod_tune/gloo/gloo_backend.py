"""Runs in the driver: whether Horovod is installed with Gloo, found out without importing it."""

from __future__ import annotations

import importlib.util
import mmap
from pathlib import Path

from horovod_tune.errors import BackendMissing

_GLOO_MARK = b"HOROVOD_GLOO_RENDEZVOUS_ADDR"
_CURE = "Run `horovod-tune install-horovod`."


def require_installed() -> None:
    """Raise BackendMissing where no rank could start, with the cure."""
    package = importlib.util.find_spec("horovod")
    if package is None or not package.submodule_search_locations:
        raise BackendMissing(f"Horovod is not installed. {_CURE}")
    libraries = [
        library for root in package.submodule_search_locations for library in Path(root).glob("*/mpi_lib*.so")
    ]
    if not libraries:
        raise BackendMissing(
            f"Horovod is installed, but for no framework: it has no compiled library. {_CURE}"
        )
    if not any(_mentions(library, _GLOO_MARK) for library in libraries):
        raise BackendMissing(f"Horovod is not built with Gloo. {_CURE}")


def _mentions(library: Path, mark: bytes) -> bool:
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(mark) >= 0
