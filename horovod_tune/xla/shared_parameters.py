"""Runs in the host actor: the objects of `with_parameters`, in one file that all its ranks map."""

from __future__ import annotations

import os
from typing import Any


class SharedParameters:
    """An anonymous file in memory; freed when this process and every rank that maps it have ended."""

    def __init__(self) -> None:
        self._of: Any = None
        self._descriptor: int | None = None

    def path_of(self, reference: Any) -> str | None:
        """Return a path of this host with the bytes of ``reference``, a Ray ObjectRef; None for None.

        They are fetched and written once: the next trial of the same function finds them there.
        """
        if reference is None:
            return None
        if self._descriptor is None or reference != self._of:
            self._write(reference)
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def _write(self, reference: Any) -> None:
        import ray

        content = memoryview(ray.get(reference)).cast("B")
        descriptor = os.memfd_create("horovod_tune_parameters")
        written = 0
        while written < len(content):
            written += os.write(descriptor, content[written:])
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._of, self._descriptor = reference, descriptor
