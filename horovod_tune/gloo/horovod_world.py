"""Runs in each rank: Horovod, loaded once and kept between trials. Its private APIs are used only here and in
`horovod_elastic`.

Checked against Horovod 0.28.1: `horovod.common.basics.HorovodBasics`, `_handle_map` and `mpi_lib` of
`horovod.torch.mpi_ops`, and what the library writes to stderr.

A world that a trial leaves intact is kept for the next trial, whose ``hvd.init()`` then costs two collectives
of a few bytes. The trial cannot detect this: until it calls ``hvd.init()``, Horovod behaves as if it were not
initialised, and afterwards as if that call had made the world.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
import time
from typing import Any

from horovod_tune.actors.output_reader import OutputReader, missing_ranks
from horovod_tune.actors.rank_backend import RankBackend
from horovod_tune.actors.sockets import SocketRecorder
from horovod_tune.errors import exception_chain
from horovod_tune.gloo import horovod_elastic
from horovod_tune.gloo.horovod_elastic import Collectives, notifications
from horovod_tune.horovod_build.installed import advice_on_failed_init, installed_horovod
from horovod_tune.messages import FailureKind
from horovod_tune.rank.reset.environment import horovod_settings
from horovod_tune.ray_compat.compatibility import wrap

_CLOSED_MESSAGE = "Horovod has not been initialized; use hvd.init()."
_RANK_METHODS = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "is_homogeneous")
_PROCESS_SET_METHODS = ("_process_set_rank", "_process_set_size")
_PROBE_NAME = "horovod_tune.world_probe"
_AGREEMENT_NAME = "horovod_tune.world_agreement"
# How errors of a collective begin that every rank gets, since the ranks' calls differ or Horovod cannot do
# what they ask: the ranks stay connected.
_REFUSED = re.compile(
    r"Mismatched |No \w+ operation enabled|\w+ is not supported with Join|Process-set rank zero tried"
)


class HorovodWorld(RankBackend):
    """The Horovod world of this process; one instance per process.

    The training function's ``hvd.init()`` makes the world, so `enter` does nothing. Nor does `end`: Horovod's
    stall inspector names a rank that has returned while others wait.
    """

    def __init__(self) -> None:
        self.collectives = Collectives(self.has_entered)
        self.states = notifications
        self._kept = False
        # Ranks and sizes of the world that the training function has initialised, until it shuts it down.
        self._cached: dict[tuple[Any, ...], Any] = {}
        # True if the function has called `hvd.init()`, even if that failed, and not `hvd.shutdown()` since.
        self._init_was_called = False
        self._basics: Any = None
        self._has_process_sets = False
        # The settings of this process's first world; None before it.
        self._settings: set[tuple[str, str]] | None = None
        self._sockets = SocketRecorder()
        self._shutdown_lock = threading.Lock()

    def load(self) -> None:
        """Import torch and Horovod, which takes a second, and wrap what would reveal a kept world."""
        if self._basics is not None:
            return
        from horovod.common.basics import HorovodBasics

        self._guard(HorovodBasics)  # before horovod.torch is imported, which binds the methods
        import horovod.torch as hvd

        horovod_elastic.install()
        self._basics = hvd.is_initialized.__self__

    def _guard(self, basics_class: Any) -> None:
        self._real_shutdown, self._real_initialized = basics_class.shutdown, basics_class.is_initialized
        wrap(basics_class, "init")(self._init)
        wrap(basics_class, "is_initialized")(lambda real, basics: not self._hides(basics) and real(basics))
        wrap(basics_class, "shutdown")(self._shutdown)
        for name in _RANK_METHODS + _PROCESS_SET_METHODS:
            wrap(basics_class, name)(functools.partial(self._get, name))

    def _init(self, real: Any, basics: Any, comm: Any = None, process_sets: Any = None) -> None:
        self._init_was_called = True
        self._check_settings()
        if self._hides(basics):
            self._kept = False
            if self._all_agree(comm is None and not process_sets):
                self._cache_ranks(basics)
                return
            self._shut_down()  # the kept world is not the requested one
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
        if not self._hides(basics):
            self._forget()
            self._shut_down()

    def _check_settings(self) -> None:
        """Raise ValueError if settings differ from the first world's: Horovod would mix the two and crash."""
        settings = horovod_settings()
        if self._settings is None:
            self._settings = settings
        changed = sorted({name for name, _ in self._settings ^ settings})
        if changed:
            raise ValueError(
                f"{', '.join(changed)} changed after this process's first Horovod world, and Horovod reads "
                "some of its variables once per process: a world with other values needs new processes"
            )

    def _cache_ranks(self, basics: Any) -> None:
        """Cache rank and size, so that they remain readable after the world is aborted."""
        try:
            known = {(name,): getattr(basics, name)() for name in _RANK_METHODS}
            self._cached = {**known, **{(name, 0): getattr(basics, name)(0) for name in _PROCESS_SET_METHODS}}
        except ValueError:
            raise ValueError(
                "Horovod initialization failed: the world was shut down as soon as it had formed"
            ) from None

    def _get(self, name: str, real: Any, basics: Any, *arguments: Any) -> Any:
        """Return what the method ``name`` returns, or in an aborted world what it returned before.

        There, Horovod's `broadcast_object` and the restore of an `ElasticSampler` still read rank and size;
        the next collective raises `HorovodInternalError`.
        """
        if self._hides(basics):
            raise ValueError(_CLOSED_MESSAGE)
        try:
            return real(basics, *arguments)
        except ValueError:
            known = (name, *arguments)
            if self.is_up or known not in self._cached:
                raise
            return self._cached[known]

    def _hides(self, basics: Any) -> bool:
        return self._kept and basics is self._basics

    @property
    def is_up(self) -> bool:
        """True if a world exists, kept or in use."""
        return self._basics is not None and bool(self._real_initialized(self._basics))

    def awaited_ranks(self, output: OutputReader) -> dict[int, str]:
        awaited = output.awaited_ranks()
        # In a smaller process set, Horovod's message has the ranks' numbers within the set.
        return awaited if awaited and self._has_only_the_global_set else {}

    @property
    def _has_only_the_global_set(self) -> bool:
        """True if every collective of the latest world involves all of its ranks."""
        # Horovod adds process sets after `hvd.init()` only if this variable allows it.
        allowed = dict(self._settings or ()).get("HOROVOD_DYNAMIC_PROCESS_SETS", "0")
        return not self._has_process_sets and allowed == "0"

    def has_entered(self) -> bool:
        """Return True if the function has a world by its own calls, even one that has broken since."""
        return self._init_was_called

    def describe_failure(
        self, error: BaseException, output: OutputReader
    ) -> tuple[FailureKind, str, dict[int, str]]:
        if not is_collective_error(error):
            return FailureKind.RAISED, "", {}
        if is_call_before_init(error) and not self.has_entered():
            # The function's own mistake, which it would repeat in another world.
            return FailureKind.RAISED, "", {}
        stalled = output.stall_report()
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
        self._kept = False
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

    def _all_agree(self, fits: bool) -> bool:
        """Return True if every rank requests the kept world. Waits for all of them, as hvd.init() does.

        Returns False too if the ranks' counts of collectives differ, see `_reset_collective_count`.
        """
        import torch
        from horovod.torch import mpi_ops

        # Starting a collective returns its number.
        number = float(mpi_ops.allreduce_async(torch.zeros(1), name=_PROBE_NAME))
        view = torch.tensor([0.0 if fits else 1.0, number, -number], dtype=torch.float64)
        unfit, largest, smallest = mpi_ops.allreduce(view, name=_AGREEMENT_NAME, op=mpi_ops.Max).tolist()
        mpi_ops.synchronize(int(number))
        return not unfit and largest == -smallest

    def _reset_collective_count(self) -> None:
        """Number this rank's collectives from 1: Horovod matches unnamed ones across ranks by number."""
        if self._basics is not None:
            from horovod.torch import mpi_ops

            mpi_ops._handle_map.clear()
            mpi_ops.mpi_lib.horovod_torch_reset()

    def keep(self, timeout_s: float) -> list[str]:
        """Keep the world for the next trial if it is sound; every rank of it has to call this.

        If there is none, or it has other process sets, the next ``hvd.init()`` makes a new one.
        """
        self._forget()
        if not self.is_up:
            return []
        import torch
        from horovod.torch import mpi_ops

        if mpi_ops._handle_map:
            return [f"{len(mpi_ops._handle_map)} collective(s) were started and never waited for"]
        try:
            process_sets = set(self._basics._get_process_set_ids_and_ranks())
        except ValueError:
            process_sets = set()  # another rank has shut down, which ends the world for all of them
        if process_sets != {0}:
            self.close()  # all ranks have the same process sets, so all of them get here
            return []
        try:
            handle = mpi_ops.allreduce_async(torch.zeros(1), name=_PROBE_NAME)
            end = time.monotonic() + timeout_s
            while not mpi_ops.poll(handle):
                if time.monotonic() > end:
                    return [f"a collective of all ranks did not complete within {timeout_s:g} s"]
                time.sleep(0.0002)
            mpi_ops.synchronize(handle)
        except Exception as error:  # any: the caller then replaces this process, and logs why
            return [f"a collective of all ranks failed: {error}"]
        self._kept = True
        return []


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
