"""Runs in each rank: the worlds of torch.distributed, and which ranks caused a failure.

Checked against torch 2.13: the texts of Gloo's and TCPStore's errors; against torch 2.11 and NCCL 2.28:
`get_error` of ProcessGroupNCCL.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from horovod_tune.actors.rank_backend import RankBackend
from horovod_tune.backends.torch_distributed.process_groups import ProcessGroups
from horovod_tune.backends.torch_distributed.world_store import WorldStore
from horovod_tune.errors import BackendMissing, StartFailed, exception_chain
from horovod_tune.messages import FailureKind, RankInfo
from horovod_tune.session import session
from horovod_tune.session.committed_state import States
from horovod_tune.session.session import Session, WorldBroken
from horovod_tune.tpu.chips import PEER_ENDED

# How long a rank whose collective timed out waits for other ranks to publish that theirs did too. A rank that
# publishes nothing in this time is assumed never to have entered the collective.
PEER_WAIT_S = 2.0
# Gloo raises plain RuntimeErrors, which have one of these texts.
_GLOO_ERRORS = ("gloo/transport/", "connectFullMesh failed", "failed to pass monitoredBarrier")
# Those of TCPStore in some releases. A function's own errors, such as a download's, also have such texts.
_STORE_ERRORS = ("Socket Timeout", "Broken pipe", "failed to recv", "Connection reset")
_RAISES_STORE_ERRORS = ("torch.distributed.", "horovod_tune.backends.torch_distributed.")
# The texts of timeouts. A DataLoader's timeout also has one of them, hence `_is_of_torch`.
_TIMEOUT_TEXTS = (
    *("Timed out waiting", "wait timeout after", "timed out after", "Socket Timeout"),
    "failed to pass monitoredBarrier",
)
# The functions of torch that wait for one other rank; the last is of its pipelines.
_POINT_TO_POINT = {"send", "recv", "_wait_batch_p2p"}
NCCL_ENVIRONMENT = {
    # torch's watchdog records errors, and does not kill the process.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Nor does it wait a minute for other ranks' dumps before a group can be destroyed.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
# Those of the default group, by the ranks' device.
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "tpu": "cpu:gloo,tpu:tpu_dist"}
INSTALL_TORCH_TPU = "Run `pip install torch_tpu` (TorchTPU, for Python 3.11 and newer, torch 2.11 to 2.15)."
NCCL_POLL_INTERVAL_S = 0.2
NCCL_JOIN_TIMEOUT_S = 30.0


class TorchCollectives:
    """Implements `Collectives`, for `commit` and `get_state`, with the default process group."""

    init_call = "dist.init_process_group()"

    def __init__(self, groups: ProcessGroups, use_gpu: bool) -> None:
        self._groups, self._use_gpu = groups, use_gpu

    def are_ready(self) -> bool:
        """Wait for the GPU, then return True unless the training function has destroyed the default group.

        Raises:
            WorldBroken: a collective on the GPU has failed, perhaps during this wait.
        """
        if self._use_gpu and (cuda := sys.modules["torch"].cuda).is_initialized():
            cuda.synchronize()
            if self._groups.are_aborted:
                raise WorldBroken("a collective on the GPU has failed")
        return bool(self._groups.dist.is_initialized())

    def any(self, flag: bool) -> bool:
        return True in self.gather(flag)

    def gather(self, number: int) -> list[int]:
        numbers = [0] * self._groups.dist.get_world_size()
        self._groups.dist.all_gather_object(numbers, number)
        return numbers

    def broadcast(self, state: Any, root: int) -> Any:
        states = [state]
        self._groups.dist.broadcast_object_list(states, src=root)
        return states[0]


class TorchWorld(RankBackend):
    """The world of this process, or in an elastic trial its worlds, each with new process groups.

    Args:
        stall_timeout_s: the timeout of collectives in the default group.
        connect_timeout_s: how long making that group may take.
        device: "cpu", or "cuda" or "tpu" if the group has NCCL or TorchTPU's backend in addition to Gloo.
    """

    def __init__(self, stall_timeout_s: float, connect_timeout_s: float, device: str) -> None:
        self._timeout = timedelta(seconds=stall_timeout_s)
        self._connect_timeout = timedelta(seconds=connect_timeout_s)
        self.device, self._is_watched = device, False
        self._groups = ProcessGroups(_BACKENDS[device], self._timeout, self._connect_timeout)
        self.collectives, self.states = TorchCollectives(self._groups, device == "cuda"), States()
        self._watch: threading.Thread | None = None
        # True if a collective of NCCL has timed out on this rank.
        self._has_timed_out = False

    def load(self) -> None:
        # Its functions keep the default group that exists when it is imported. If none does, they use the
        # current one.
        importlib.import_module("torch.distributed.nn.functional")
        if self.device == "tpu":
            # Before the default group, or it would not register its backend.
            try:
                importlib.import_module("torch_tpu._loader").load()
            except ImportError as error:
                text = f"torch_tpu cannot be imported on this host ({error}). {INSTALL_TORCH_TPU}"
                raise BackendMissing(text) from error
        self._groups.install()
        # Without the watch, torch's own watchdog ends the process. Releases before 2.7 lack `get_error`.
        nccl = getattr(self._groups.dist.distributed_c10d, "ProcessGroupNCCL", None)
        self._is_watched = self.device == "cuda" and hasattr(nccl, "get_error")
        if self._is_watched:
            for name, value in NCCL_ENVIRONMENT.items():
                os.environ.setdefault(name, value)

    def answers(self) -> Sequence[Callable[..., Any]]:
        return (self.serve_store,)

    def serve_store(self, host: str) -> int:
        """Open the next world's TCPStore on this host's address ``host``; return its port.

        As under torchrun, it accepts connections without a secret; it unpickles nothing.
        """
        with socket.create_server((host, 0), backlog=socket.SOMAXCONN) as listener:
            port = int(listener.getsockname()[1])
            # Shared with `init_rpc`, in which rank 0 opens a store at MASTER_PORT.
            shared = {"wait_for_workers": False, "multi_tenant": True}
            self._server = self._groups.dist.TCPStore(
                host, port, is_master=True, master_listen_fd=listener.detach(), **shared
            )
        return port

    def enter(self, rank_info: RankInfo, name: str) -> None:
        """Make the default group of world ``name``; return when every rank has made it.

        Raises:
            BackendMissing: torch has no NCCL, or torch_tpu finds no TPU.
            StartFailed: this rank cannot use its TPU chip.
            WorldBroken: a rank was lost meanwhile, did not arrive within the group's timeout (or a minute, if
                that is longer), or could not be reached within ``connect_timeout_s``.
        """
        if self.device == "cuda" and not self._groups.dist.is_nccl_available():
            raise BackendMissing(
                "use_gpu=True needs NCCL, which this torch lacks: install a CUDA build of torch"
            )
        if self.device == "tpu":
            if not self._groups.dist.is_backend_available("tpu_dist"):
                raise BackendMissing("torch_tpu finds no TPU on this host, so it has no backend tpu_dist")
            # Starts the TPU runtime now, since the sockets that a group opens end with the world.
            sys.modules["torch"].accelerator.current_stream()
        self._groups.free()
        self._has_timed_out = False
        self._groups.store = store = WorldStore(self._groups.dist, rank_info)
        try:
            with self._groups.sockets.forming():
                store.connect(self._connect_timeout)
                store.publish("arrived")
                self._groups.make_default(store)
                # Otherwise a rank whose function returns immediately would leave while others still connect.
                store.wait_for_others(self._timeout)
        except RuntimeError as error:
            if self.device == "tpu" and not self._is_of_torch(error):
                chip = os.environ.get("TPU_VISIBLE_DEVICES")
                raise StartFailed(f"this rank cannot use TPU chip {chip} of its host: {error}") from error
            missing = ", ".join(map(str, store.ranks("arrived", published=False)))
            without = f", rank(s) {missing} did not arrive" if missing else ""
            raise WorldBroken(f"the process group could not be made{without}: {error}") from error
        if self._is_watched:
            live = session.current()
            assert live is not None, "a world is entered by the thread that trains in it"
            self._watch_over = threading.Event()
            arguments = live, store, self._watch_over
            self._watch = threading.Thread(target=self._watch_nccl, args=arguments, daemon=True)
            self._watch.start()

    def _watch_nccl(self, live: Session, store: WorldStore, is_over: threading.Event) -> None:
        """Break the world as soon as a collective of NCCL cannot complete.

        If another rank dies or never enters a collective, this rank would wait for its GPU until torch's
        watchdog kills the process. The abort ends the wait without an error: the function continues with
        invalid data up to its next collective, report or commit, which raises.
        """
        errors: list[str] = []
        while not errors:
            if is_over.wait(NCCL_POLL_INTERVAL_S):
                return
            errors = [each for each in map(_nccl_error, self._groups.all()) if each not in ("", "SUCCESS")]
        self._has_timed_out = errors[0] == "TIMEOUT"
        if self._has_timed_out:
            store.publish("timed out")
        # Before the abort, which lets the function continue: `report` must already fail.
        live.break_world(was_unnoticed=True)
        self._groups.abort()

    def end(self, *, has_returned: bool) -> None:
        """Raise an error in ranks that wait for this one. Gloo's groups end with the process."""
        if (store := self._groups.store) is None:  # no world was entered, or it has ended
            return
        if has_returned:
            store.publish("returned")
        if self._watch is not None:
            self._watch_over.set()
            self._watch.join(NCCL_JOIN_TIMEOUT_S)
            self._watch = None
        if self.device != "cpu":
            # Not only with the process: a kernel that others wait for may still run on this rank's GPU, and
            # torch_tpu's exit handler waits for all ranks of a group that is left.
            if not has_returned:
                # Otherwise, destroying an NCCL group may wait for collectives that a lost rank never enters.
                self._groups.abort()
            self._groups.end()
        self._groups.sockets.shut_down()  # what was sent still arrives
        store.publish("ended")
        if has_returned:
            store.serve_until_all_ended()

    def leave(self) -> None:
        self.end(has_returned=False)
        self._groups.leave()

    def close(self) -> None:
        """Break the world, so that ranks which wait in a collective get an error, including this rank."""
        if (store := self._groups.store) is not None:  # while ranks make a group, they wait for the store
            store.close()
        self._groups.abort()

    def abort(self) -> None:
        """Break a world that has lost a rank. Returns when no process group is still being created."""
        self.close()
        while self._groups.sockets.is_forming:  # the group that is being made opens more sockets
            self._groups.sockets.shut_down()
            time.sleep(0.05)

    def describe_failure(
        self, error: BaseException, stall_report: Callable[[], str]
    ) -> tuple[FailureKind, str, dict[int, str]]:
        if (store := self._groups.store) is None:  # the function, or torch, could not be imported
            return FailureKind.RAISED, "", {}
        chain = list(exception_chain(error))
        texts = [str(each) for each in chain if self._is_of_torch(each)]
        is_broken = any(isinstance(each, WorldBroken) for each in chain)
        has_timed_out = any(mark in text for text in texts for mark in _TIMEOUT_TEXTS)
        if self._has_timed_out or (has_timed_out and not is_broken):
            store.publish("timed out")
            calls = {name for each in chain for module, name in _calls(each) if module.startswith("torch.")}
            # Otherwise the ranks that did not time out may include some that this one did not wait for.
            waited_for_all = len(self._groups.all()) <= 1 and calls.isdisjoint(_POINT_TO_POINT)
            time.sleep(PEER_WAIT_S)
            late = store.ranks("timed out", published=False) if waited_for_all else {}
            return FailureKind.STALLED, "", late
        if is_broken or texts:
            returned = store.ranks("returned")
            return FailureKind.STALLED if returned else FailureKind.DISCONNECTED, "", returned
        return FailureKind.RAISED, "", {}

    def _is_of_torch(self, error: BaseException) -> bool:
        """Return True if a collective or the store raised ``error``."""
        from_store = any(module.startswith(_RAISES_STORE_ERRORS) for module, _ in _calls(error)[-1:])
        marks = _GLOO_ERRORS + _STORE_ERRORS * from_store + PEER_ENDED * (self.device == "tpu")
        is_plain = isinstance(error, RuntimeError) and any(text in str(error) for text in marks)
        return is_plain or isinstance(error, self._groups.dist.DistError)


def _nccl_error(group: Any) -> str:
    """Return the name of the error that torch's watchdog has recorded; "" for a group without NCCL."""
    try:
        return str(group._get_backend(sys.modules["torch"].device("cuda")).get_error().name)
    except (RuntimeError, AttributeError):
        return ""


def _calls(error: BaseException) -> list[tuple[str, str]]:
    """Return the modules and names of the functions that ``error`` passed through, the innermost last."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [(frame.f_globals.get("__name__", ""), frame.f_code.co_name) for frame in frames]
