"""One rank on a TPU host: connects to the host actor, then runs one trial's training function after another.

torch_xla's launcher calls `serve`, which receives messages while the training function runs in its own
thread. A rank that compiles for minutes thus still sends heartbeats.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import json
import os
import pickle
import queue
import signal
import socket
import sys
import tempfile
import threading
import traceback
from dataclasses import astuple
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

from horovod_tune.channel.framing import HOST_MESSAGES, Channel
from horovod_tune.errors import encodable
from horovod_tune.messages import (
    CheckpointPlace,
    Failed,
    Finished,
    Message,
    RankInfo,
    Report,
    TrialRequest,
)
from horovod_tune.rank.streams import flush_streams
from horovod_tune.rank.training import Training
from horovod_tune.session.session import Session
from horovod_tune.transfer.host_copies import HostCopies, open_checkpoint

if TYPE_CHECKING:
    from horovod_tune.rank.reset.baseline import Baseline
    from horovod_tune.xla.torch_xla_runtime import TorchXla

_PR_SET_PDEATHSIG = 1
# On TPU v2 and v3, a process has two ranks.
_one_at_a_time = threading.Lock()
_output: IO[bytes] | None = None
_baseline: Baseline | None = None


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the thread that started it ends.

    Thus each rank ends with its parent, and the parent with its host actor: an orphan would lock the chip.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # the parent had already ended


def serve(
    ordinal: int, registry_fd: int, runtime_class: type[TorchXla], parent: int, heartbeat_s: float
) -> None:
    """Run this rank until its host actor closes the channel. Called in each rank by the runtime."""
    die_with_parent(parent)
    faulthandler.enable()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(None)  # a fork has its parent's random state
    try:
        runtime = runtime_class()
        with _one_at_a_time:
            runtime.open_cache()
        _Rank(runtime, registry_fd).run(heartbeat_s)
    except BaseException:  # any: sent to the host actor, which raises it
        abort(registry_fd)
    # Without exit handlers: the runtime's may wait for other hosts.
    os._exit(0)


def abort(registry_fd: int) -> NoReturn:
    """Send the host actor the current exception, which this rank cannot handle, and end the process.

    torch_xla would treat the exception as a result, and return it only when every other rank has ended.
    """
    text = traceback.format_exc(limit=-12)
    registry = socket.socket(fileno=os.dup(registry_fd))
    registry.send(json.dumps({"kind": "lost", "pid": os.getpid(), "error": text[-20000:]}).encode())
    os._exit(1)


def _join(registry_fd: int, rank_info: RankInfo) -> Channel:
    """Send the host actor this rank's numbers, the channel's other end, and the file of its output."""
    ours, theirs = socket.socketpair()
    hello = {"kind": "hello", "pid": os.getpid(), "rank_info": astuple(rank_info)}
    with theirs, socket.socket(fileno=os.dup(registry_fd)) as registry:
        descriptors = [theirs.fileno(), *_redirect_output()]
        socket.send_fds(registry, [json.dumps(hello).encode()], descriptors)
    return Channel(ours, HOST_MESSAGES)


def _redirect_output() -> list[int]:
    """Redirect this process's output, C++ included, to an unnamed file; return the file the first time."""
    global _output
    with _one_at_a_time:
        if _output is not None:
            return []
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        _output = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        # Append, since the host actor truncates the file.
        fcntl.fcntl(_output, fcntl.F_SETFL, os.O_APPEND)
        os.dup2(_output.fileno(), 1)
        os.dup2(_output.fileno(), 2)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        return [_output.fileno()]


def _process_baseline() -> Baseline:
    """Return the baseline that the ranks of this process share, made when the first trial begins.

    By then all ranks are set up, and the function of none has been called.
    """
    from horovod_tune.rank.reset.baseline import Baseline

    global _baseline
    with _one_at_a_time:
        _baseline = _baseline or Baseline()
        return _baseline


class _Rank:
    """Handles the host actor's messages, in the thread in which the runtime called `serve`."""

    def __init__(self, runtime: TorchXla, registry_fd: int) -> None:
        self._runtime = runtime
        self._host = socket.gethostname()
        self._training: Training | None = None
        self._copies = HostCopies()
        self._fetched: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        # With the first thread, the C library installs a signal handler, which the baseline must include.
        first = threading.Thread(target=lambda: None)
        first.start()
        first.join()
        runtime.begin_baseline()
        self._channel = _join(registry_fd, runtime.rank_info())

    def run(self, heartbeat_s: float) -> None:
        is_open = True
        while is_open:
            messages, is_open = self._channel.receive(heartbeat_s)
            for message in messages:
                self._handle(message)
            if is_open and not messages:
                # If the host actor has closed its end, the next `receive` says so.
                with contextlib.suppress(OSError):
                    self._channel.send("alive", operations=self._runtime.operations())

    def _handle(self, message: dict[str, Any]) -> None:
        match message:
            case {"kind": "begin", "pickled_request": request, "world": world, "node_id": node_id}:
                self._copies = HostCopies(Path(message["copies"]))
                self._begin(request, RankInfo(*world), node_id)
            case {"kind": "acknowledge", "index": index, "pickled_checkpoint": checkpoint}:
                if self._training is not None:
                    self._training.session.acknowledge(index, pickle.loads(checkpoint))
            case {"kind": "stop"}:
                if self._training is not None:
                    self._training.session.stop()
            case {"kind": "fetched"}:
                self._fetched.put(message)
            case {"kind": "dump_stack"}:
                stack = self._training.stack() if self._training is not None else ""
                self._channel.send("stack", stack=encodable(stack))
            case {"kind": "reset", "join_s": join_s}:
                self._channel.send("reset_done", problems=list(map(encodable, self._reset(join_s))))

    def _begin(self, packed: bytes, world: RankInfo, node_id: str) -> None:
        baseline = _process_baseline()  # first, since reading the config may import the user's modules
        try:
            # From this host's actor, over a pair of sockets that only it and this process have.
            request: TrialRequest = pickle.loads(packed)
        except Exception as error:
            # For example, the config has an object of a class whose module this host lacks.
            text = encodable(f"the trial's config cannot be read here:\n{traceback.format_exc()}")
            self._send(Failed(world.rank, self._host, self._runtime.describe_failure(error)[0], text))
            return
        fetch = functools.partial(open_checkpoint, node_id=node_id, copies=self._copies, ask=self._ask_node)
        live = Session(request, world, send=self._send, fetch=fetch)
        live.before_first_report = baseline.environment.check
        self._training = Training(
            live,
            request.function,
            host=self._host,
            send=self._send,
            prepare=self._runtime.enter_thread(),
            describe_failure=self._runtime.describe_failure,
        )
        self._training.start()

    def _send(self, message: Message) -> None:
        if not isinstance(message, Report):
            self._copies.release_all()
            flush_streams()
        match message:
            case Report():
                assert self._training is not None, "its training function has reported"
                self._channel.send("report", run=self._training.session.request.run, **vars(message))
            case Finished():
                self._channel.send("finished")
            case Failed(kind=kind, traceback=text):
                self._channel.send("failed", failure_kind=kind.value, traceback=text)

    def _ask_node(self, place: CheckpointPlace, target: str | None = None) -> Any:
        """Make the host actor call `host_copies.ask_node`: this process has no connection to Ray."""
        self._channel.send("fetch", path=place.path, node_id=place.node_id, target=target)
        # Without a timeout: `host_copies.ask_node` has one, after which the actor replies with its error, and
        # this process dies with the actor.
        answer = self._fetched.get()
        if why := answer["error"]:
            raise RuntimeError(f"the checkpoint {place.path} could not be copied to this host:\n{why}")
        return answer["fingerprint"]

    def _reset(self, join_s: float) -> list[str]:
        assert self._training is not None
        self._training.thread.join(timeout=join_s)
        if self._training.thread.is_alive():
            return [f"the training function of rank {self._training.session.rank_info.rank} still runs"]
        own_package, self._training = self._training.session.own_package, None
        baseline = _process_baseline()
        with _one_at_a_time:
            problems = baseline.restore(own_package) + self._runtime.restore()
            return problems + baseline.memory_left()
