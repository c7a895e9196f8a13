"""Runs in each rank: Horovod's world, and which errors mean that another rank is lost.

Horovod's private APIs are used only here and in `horovod_elastic`. Checked against Horovod 0.28.1:
`horovod.common.basics.HorovodBasics`, `_handle_map` and `mpi_lib` of `horovod.torch.mpi_ops`, and what the
library writes to stderr.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

from horovod_tune.actors.rank_backend import RankBackend
from horovod_tune.actors.rank_output import missing_ranks
from horovod_tune.actors.sockets import SocketRecorder
from horovod_tune.backends.horovod import horovod_elastic
from horovod_tune.backends.horovod.horovod_elastic import Collectives, notifications
from horovod_tune.compatibility import wrap
from horovod_tune.errors import exception_chain
from horovod_tune.horovod_build.installed import advice_on_failed_init, installed_horovod
from horovod_tune.messages import FailureKind

_CLOSED_MESSAGE = "Horovod has not been initialized; use hvd.init()."
_RANK_METHODS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous")
_PROCESS_SET_METHODS = ("_process_set_rank", "_process_set_size")
# How errors of a collective begin that every rank gets, since the ranks' calls differ or Horovod cannot do
# what they ask: the ranks stay connected.
_REFUSED = re.compile(
    r"Mismatched |No \w+ operation enabled|\w+ is not supported with Join|Process-set rank zero tried"
)


class HorovodWorld(RankBackend):
    """The Horovod world of this process; one instance per process.

    The training function's ``hvd.init()`` makes the world, so `enter` does nothing. Nor does `end`: Horovod
    itself leaves the world when the process exits.
    """

    def __init__(self) -> None:
        self.collectives = Collectives(self.has_entered)
        self.states = notifications
        # Ranks and sizes of the world that the training function has initialised, until it shuts it down.
        self._cached: dict[tuple[Any, ...], Any] = {}
        # True if the function has called `hvd.init()`, even if that failed, and not `hvd.shutdown()` since.
        self._init_was_called = False
        self._basics: Any = None
        self._has_process_sets = False
        self._sockets = SocketRecorder()
        self._shutdown_lock = threading.Lock()

    def load(self) -> None:
        """Import torch and Horovod, which takes a second the first time."""
        if self._basics is not None:
            return
        from horovod.common.basics import HorovodBasics

        self._wrap(HorovodBasics)  # before horovod.torch is imported, which binds the methods
        import horovod.torch as hvd

        horovod_elastic.install()
        self._basics = hvd.is_initialized.__self__

    def _wrap(self, basics_class: Any) -> None:
        self._real_shutdown, self._real_initialized = basics_class.shutdown, basics_class.is_initialized
        wrap(basics_class, "init")(self._init)
        wrap(basics_class, "shutdown")(self._shutdown)
        for name in _RANK_METHODS + _PROCESS_SET_METHODS:
            wrap(basics_class, name)(functools.partial(self._get, name))

    def _init(self, real: Any, basics: Any, comm: Any = None, process_sets: Any = None) -> None:
        self._init_was_called = True
        self._has_process_sets = bool(process_sets)
        self._reset_collective_count()
        self._sockets.forget()
        with self._sockets.forming(), self._sockets.recording():
            try:
                real(basics, comm, process_sets)
                self._cache_ranks(basics)
            except Exception:
                # Until it is shut down, Horovod remembers the failure and does not try again.
                self._real_shutdown(basics)
                raise

    def _shutdown(self, real: Any, basics: Any) -> None:
        self._forget()
        self._shut_down()

    def _reset_collective_count(self) -> None:
        """Number this rank's collectives from 1: Horovod matches unnamed ones across ranks by number.

        In an elastic trial, some ranks of the next world are new processes.
        """
        if self._basics is not None:
            from horovod.torch import mpi_ops

            mpi_ops._handle_map.clear()
            mpi_ops.mpi_lib.horovod_torch_reset()

    def _cache_ranks(self, basics: Any) -> None:
        """Cache rank and size, so that they remain readable after the world is aborted."""
        try:
            known = {(name,): getattr(basics, name)() for name in _RANK_METHODS}
            self._cached = {**known, **{(name, 0): getattr(basics, name)(0) for name in _PROCESS_SET_METHODS}}
        except ValueError as error:
            raise ValueError(
                "Horovod initialization failed: the world was shut down as soon as it had formed"
            ) from error

    def _get(self, name: str, real: Any, basics: Any, *arguments: Any) -> Any:
        """Return what the method ``name`` returns, or in an aborted world what it returned before.

        There, Horovod's `broadcast_object` and the restore of an `ElasticSampler` still read rank and size;
        the next collective raises `HorovodInternalError`.
        """
        try:
            return real(basics, *arguments)
        except ValueError:
            known = (name, *arguments)
            if self.is_up or known not in self._cached:
                raise
            return self._cached[known]

    @property
    def is_up(self) -> bool:
        """True if a world exists."""
        return self._basics is not None and bool(self._real_initialized(self._basics))

    def confirms_awaited(self) -> bool:
        # In a smaller process set, Horovod's message has the ranks' numbers within the set.
        return self._has_only_the_global_set

    @property
    def _has_only_the_global_set(self) -> bool:
        """True if every collective of the latest world involves all of its ranks."""
        # Horovod adds process sets after `hvd.init()` only if this variable allows it.
        allowed = os.environ.get("HOROVOD_DYNAMIC_PROCESS_SETS", "0")
        return not self._has_process_sets and allowed == "0"

    def has_entered(self) -> bool:
        """Return True if the function has a world by its own calls, even one that has broken since."""
        return self._init_was_called

    def describe_failure(
        self, error: BaseException, stall_report: Callable[[], str]
    ) -> tuple[FailureKind, str, dict[int, str]]:
        if not is_collective_error(error):
            return FailureKind.RAISED, "", {}
        if is_call_before_init(error) and not self.has_entered():
            # The function's own mistake, which it would repeat in another world.
            return FailureKind.RAISED, "", {}
        stalled = stall_report()
        if "Will shutdown" in stalled:
            awaited = missing_ranks(stalled.splitlines()) if self._has_only_the_global_set else {}
            return FailureKind.STALLED, f"\nHorovod's stall inspector:\n{stalled}\n", awaited
        advice = advice_on_failed_init(installed_horovod()) if isinstance(error, ValueError) else ""
        return FailureKind.DISCONNECTED, advice and f"\n{advice}\n", {}

    def world_error(self, text: str) -> BaseException:
        """Return Horovod's own error for a broken world: `hvd.elastic.run` and users' functions expect it."""
        from horovod.common.exceptions import HorovodInternalError

        return HorovodInternalError(text)

    def leave(self) -> None:
        """Shut the world down before the training function is called again and makes the next one itself."""
        self._forget()
        self.close()

    def _forget(self) -> None:
        self._cached, self._init_was_called = {}, False

    def close(self) -> None:
        """Shut the world down. Every waiting collective then fails, on all ranks, and ends the function."""
        self._shut_down()

    def abort(self) -> None:
        """Shut down a world that has lost a rank, even while it is formed, without waiting for peers."""
        self._sockets.shut_down()
        self.close()

    def _shut_down(self) -> None:
        # The training function and `close` may call this concurrently; Horovod itself takes no lock.
        with self._shutdown_lock:
            if self.is_up:
                self._real_shutdown(self._basics)


def is_call_before_init(error: BaseException) -> bool:
    """Return True if Horovod raised because its world was never made, was shut down, or is broken."""
    return _CLOSED_MESSAGE in str(error)


def is_collective_error(error: BaseException) -> bool:
    """Return True if Horovod raised because another rank left: this rank's code is then not the cause."""
    if internal := sys.modules.get("horovod.common.exceptions"):
        kinds = (internal.HorovodInternalError, internal.HostsUpdatedInterrupt)
        if found := [str(each) for each in exception_chain(error) if isinstance(each, kinds)]:
            return not any(map(_REFUSED.match, found))
    # hvd.init() raises a plain ValueError if it cannot reach the other ranks.
    return isinstance(error, ValueError) and "Horovod initialization failed" in str(error)
