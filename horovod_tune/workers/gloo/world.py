"""Horovod in this rank: loaded once, kept between trials. All that we touch of its privates is here.

Checked against Horovod 0.28.1: `horovod.common.basics.HorovodBasics`, `horovod.torch.mpi_ops._handle_map`,
`horovod.common.process_sets`, and what the library writes to stderr.

A world that a trial leaves sound is kept for the next one, so that its ``hvd.init()`` costs nothing. The
trial cannot tell: until it calls ``hvd.init()`` a kept world answers as one that is not initialised.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from typing import Any

_CLOSED_MESSAGE = "Horovod has not been initialized; use hvd.init()."
_FACTS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous")
PROBE_NAME = "horovod_tune.world_probe"


class HorovodWorld:
    """The Horovod world of this process; one instance a process."""

    def __init__(self) -> None:
        self._kept = False
        self._basics: Any = None
        self._lock = threading.Lock()

    def load(self) -> None:
        """Import torch and Horovod, which takes a second, and put `_kept` in front of Horovod's functions."""
        with self._lock:
            if self._basics is not None:
                return
            from horovod.common.basics import HorovodBasics

            self._guard(HorovodBasics)
            import horovod.torch  # noqa: F401
            from horovod.torch.mpi_ops import _basics

            self._basics = _basics

    def _guard(self, basics_class: Any) -> None:
        real_init, real_shutdown = basics_class.init, basics_class.shutdown
        real_initialized = basics_class.is_initialized
        world = self

        @functools.wraps(real_init)
        def init(basics: Any, comm: Any = None, process_sets: Any = None) -> Any:
            if world._kept and basics is world._basics:
                world._kept = False
                if comm is None and not process_sets:
                    return None
                real_shutdown(basics)  # the kept world is not the one that is asked for
            return real_init(basics, comm, process_sets)

        @functools.wraps(real_initialized)
        def is_initialized(basics: Any) -> bool:
            return not world._hides(basics) and real_initialized(basics)

        @functools.wraps(real_shutdown)
        def shutdown(basics: Any) -> None:
            if not world._hides(basics):
                real_shutdown(basics)

        basics_class.init, basics_class.is_initialized = init, is_initialized
        basics_class.shutdown = shutdown
        self._real_shutdown, self._real_initialized = real_shutdown, real_initialized
        for name in _FACTS:
            setattr(basics_class, name, self._guarded_fact(getattr(basics_class, name)))

    def _guarded_fact(self, real: Any) -> Any:
        @functools.wraps(real)
        def fact(basics: Any) -> Any:
            if self._hides(basics):
                raise ValueError(_CLOSED_MESSAGE)
            return real(basics)

        return fact

    def _hides(self, basics: Any) -> bool:
        return self._kept and basics is self._basics

    @property
    def is_up(self) -> bool:
        """Whether a world exists, kept or in use."""
        return self._basics is not None and bool(self._real_initialized(self._basics))

    def close(self) -> None:
        """Shut the world down: every collective that any rank waits in fails, and so ends its function."""
        self._kept = False
        if self.is_up:
            self._real_shutdown(self._basics)

    def keep(self, *, timeout_s: float) -> tuple[list[str], int | None]:
        """Keep the world for the next trial if it is sound; every rank of it has to call this.

        Returns:
            what is wrong with it, and the number of collectives that this rank has named by itself.
        """
        if not self.is_up:
            return [], None  # the trial called hvd.shutdown(), or never hvd.init()
        problems = self._leftovers()
        if problems:
            return problems, None
        import torch
        from horovod.torch import mpi_ops

        handle = mpi_ops.allreduce_async(torch.zeros(1), name=PROBE_NAME)
        end = time.monotonic() + timeout_s
        while not mpi_ops.poll(handle):
            if time.monotonic() > end:
                return [f"a collective of all ranks did not complete within {timeout_s:g} s"], None
            time.sleep(0.0005)
        try:
            mpi_ops.synchronize(handle)
        except Exception as error:
            return [f"a collective of all ranks failed: {error}"], None
        self._kept = True
        return [], int(handle)

    def _leftovers(self) -> list[str]:
        from horovod.torch import mpi_ops

        problems = []
        if mpi_ops._handle_map:
            problems.append(f"{len(mpi_ops._handle_map)} collective(s) were started and never waited for")
        sets = set(self._basics._get_process_set_ids_and_ranks()) - {0}
        if sets:
            problems.append(f"process sets {sorted(sets)} were added and not removed")
        return problems


def is_collective_error(error: BaseException) -> bool:
    """Whether Horovod raised because another rank left, so that this rank's traceback is not the cause."""
    internal = sys.modules.get("horovod.common.exceptions")
    names = ("HorovodInternalError", "HostsUpdatedInterrupt")
    kinds = tuple(getattr(internal, name) for name in names if hasattr(internal, name))
    chain: BaseException | None = error
    while chain is not None:
        if kinds and isinstance(chain, kinds):
            return True
        chain = chain.__cause__ or chain.__context__
    # hvd.init() that cannot reach the others raises a plain ValueError.
    return isinstance(error, ValueError) and "Horovod initialization failed" in str(error)


class OutputReader:
    """Reads what this process has printed since the last time, C++ libraries included.

    Ray gives each worker process a file for stdout and one for stderr; reading those costs the training
    function nothing and needs neither a pipe nor a thread.
    """

    def __init__(self) -> None:
        self._paths = [os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)]
        self._offsets = [self._size(path) for path in self._paths]
        self._stderr_mark = self._offsets[1]

    @staticmethod
    def _size(path: str) -> int:
        try:
            return os.stat(path).st_size if os.path.isfile(path) else 0
        except OSError:
            return 0

    def mark(self) -> None:
        """Start anew: what was printed so far belongs to the trial before."""
        self._flush()
        self._offsets = [self._size(path) for path in self._paths]
        self._stderr_mark = self._offsets[1]

    def take(self, limit: int = 1 << 20) -> bytes:
        """Return what is new, up to ``limit`` bytes a stream, without Ray's own marker lines."""
        self._flush()
        parts = []
        for i, path in enumerate(self._paths):
            if os.path.isfile(path) and self._size(path) > self._offsets[i]:
                with open(path, "rb") as file:
                    file.seek(self._offsets[i])
                    new = file.read(limit)
                self._offsets[i] += len(new)
                parts.append(new)
        lines = b"".join(parts).splitlines(keepends=True)
        return b"".join(line for line in lines if not line.startswith(b":") or b"_name:" not in line[:16])

    def stall_report(self) -> str:
        """Return what Horovod's stall inspector wrote to stderr during this trial."""
        path = self._paths[1]
        if not os.path.isfile(path):
            return ""
        with open(path, "rb") as file:
            file.seek(self._stderr_mark)
            text = file.read(1 << 20).decode("utf-8", "replace")
        lines = text.splitlines()
        first = next((i for i, line in enumerate(lines) if "stall_inspector" in line), None)
        return "" if first is None else "\n".join(lines[first : first + 20])

    @staticmethod
    def _flush() -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
