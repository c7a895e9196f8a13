"""Runs in the host actor: starts the parent process and the ranks, and receives their messages."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import psutil

from horovod_tune.channel.framing import RANK_MESSAGES, Channel
from horovod_tune.channel.packing import MalformedMessage
from horovod_tune.files.process_start import process_start
from horovod_tune.messages import FailureKind, RankInfo
from horovod_tune.xla.topology import LaunchPlan

TICK_S = 0.5
# How long the parent may take to report how a rank ended.
EXIT_REASON_TIMEOUT_S = 5.0
_BOOT = "import json, sys; path, *arguments = json.loads(sys.argv[1]); sys.path[:] = path; "
_BOOT += "import horovod_tune.xla.parent as parent; parent.main(*arguments)"
_READ_BYTES = 1 << 20
_TAIL_BYTES = 16000
# The beginning of a long line that Python's fault handler prints last.
_NOISE = "Extension modules: "

_USUAL_CAUSES = {
    signal.SIGSEGV: " (segmentation fault). On a TPU host the usual cause is a lack of memory: load less "
    "in each rank, or share one model (horovod_tune.with_parameters).",
    signal.SIGKILL: ". The kernel killed it since memory ran out (see `dmesg`), or another process did so.",
}


class RankProcess:
    """The host actor's record of one rank.

    ``info`` has its host's place among the hosts only after `HostActor.assign`. ``output`` is the file of its
    process's output, empty for the second rank of a process.
    """

    def __init__(self, info: RankInfo, pid: int, channel: Channel, output: int) -> None:
        self.info, self.pid, self.channel = info, pid, channel
        # True while its training function runs.
        self.is_running = False
        # True while the host actor fetches a checkpoint for it.
        self.is_fetching = False
        # How the rank was lost; None until then.
        self.loss: tuple[FailureKind, str] | None = None
        # Its replies to `Supervisor.ask`, by kind.
        self.replies: dict[str, dict[str, Any]] = {}
        self.operations = 0
        self.last_heard = time.monotonic()
        self._cpu_s = -1.0
        self._output, self._read_bytes = output, 0

    def send(self, kind: str, **fields: Any) -> None:
        """Send the rank a message, unless it has ended, which the supervisor reports."""
        with contextlib.suppress(OSError):
            self.channel.send(kind, **fields)

    def new_output(self) -> Iterator[bytes]:
        """Yield what its process has printed since the last call."""
        while text := os.pread(self._output, _READ_BYTES, self._read_bytes):
            self._read_bytes += len(text)
            yield text

    def last_output(self) -> str:
        start = max(0, os.fstat(self._output).st_size - _TAIL_BYTES)
        printed = os.pread(self._output, _TAIL_BYTES, start).decode("utf-8", "replace").splitlines()
        return "\n".join(line for line in printed if not line.startswith(_NOISE)).strip()

    def drop_output(self) -> None:
        """Delete what its process has printed so far."""
        os.ftruncate(self._output, 0)
        self._read_bytes = 0

    def is_unresponsive(self, timeout_s: float) -> bool:
        """Return True if it has neither sent anything nor computed for ``timeout_s``.

        A rank that holds the GIL while it compiles cannot send, but it computes.
        """
        with contextlib.suppress(psutil.NoSuchProcess):
            used_s = sum(psutil.Process(self.pid).cpu_times()[:2])
            if used_s > self._cpu_s:
                self._cpu_s, self.last_heard = used_s, time.monotonic()
        return time.monotonic() - self.last_heard > timeout_s


class Supervisor:
    """The ranks of one host, and their parent.

    One thread per rank receives its messages. It calls ``on_message(rank, message)`` for each that is neither
    a heartbeat nor a reply, and finally ``on_loss(rank)``.
    """

    def __init__(
        self,
        runtime_path: str,
        *,
        heartbeat_s: float,
        on_message: Callable[[RankProcess, dict[str, Any]], None],
        on_loss: Callable[[RankProcess], None],
    ) -> None:
        self._heartbeat_s, self._on_message, self._on_loss = heartbeat_s, on_message, on_loss
        self._registry, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._parent: subprocess.Popen[bytes] | None = None
        # How the parent's processes have ended, by pid; None while the parent runs.
        self._exits: dict[int, int | None] | None = None
        self._launch_error = ""
        self._last_errors: dict[int, str] = {}
        self._changed = threading.Condition()
        self.ranks: list[RankProcess] = []
        arguments = [sys.path, self._theirs.fileno(), runtime_path, os.getpid(), heartbeat_s]
        command = [sys.executable, "-c", _BOOT, json.dumps(arguments)]
        # A process that requested to die with its parent dies with the *thread* that started it.
        threading.Thread(target=self._run, args=(command,), name="xla-supervisor", daemon=True).start()

    def launch(self, plan: LaunchPlan, timeout_s: float) -> list[RankProcess]:
        """Start the ranks; return them when all have started, however long that takes.

        Raises:
            RuntimeError: they could not start (the message has the parent's error), or a process was
                suspended for ``timeout_s``.
        """
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the parent has ended
            self._registry.send(pickle.dumps(plan))
        since: dict[int, float] = {}
        with self._changed:
            while not self._changed.wait_for(
                lambda: self._is_up or self._exits is not None, self._heartbeat_s
            ):
                # There is no time limit: before a rank can send, it waits for the ranks of the whole slice.
                since = {pid: since.get(pid, time.monotonic()) for pid in suspended_below(os.getpid())}
                for pid, began in since.items():
                    if time.monotonic() - began > timeout_s:
                        raise RuntimeError(
                            f"process {pid} was suspended for {timeout_s:g} s (timeout_s) while it started"
                        )
            if not self._is_up:
                raise RuntimeError(self._exit_reason())
            return self.ranks

    @property
    def _is_up(self) -> bool:
        return bool(self.ranks) and len(self.ranks) == self.ranks[0].info.local_size

    def processes(self) -> list[tuple[int, float]]:
        """Return (pid, `process_start`) of the parent and of every rank."""
        processes = []
        for pid in [*(rank.pid for rank in self.ranks), *([self._parent.pid] if self._parent else [])]:
            with contextlib.suppress(psutil.NoSuchProcess):
                processes.append((pid, process_start(pid)))
        return processes

    def ask(
        self, ranks: Collection[RankProcess], request: str, reply: str, timeout_s: float, **fields: Any
    ) -> dict[int, dict[str, Any]]:
        """Send ranks a request; return the replies that came in time, by rank. Do not wait for lost ranks."""
        for rank in ranks:
            rank.replies.pop(reply, None)
            rank.send(request, **fields)
        with self._changed:
            self._changed.wait_for(
                lambda: all(reply in each.replies or each.loss for each in ranks), timeout_s
            )
            return {each.info.rank: each.replies[reply] for each in ranks if reply in each.replies}

    def activity(self) -> tuple[int, float]:
        """Return the ranks' operations and CPU time so far, as `Inactivity.update` takes them."""
        cpu_s = 0.0
        for pid in {rank.pid for rank in self.ranks}:  # TPU v2 and v3 have two ranks in a process
            # A process that ends meanwhile makes the sum smaller, which counts as activity.
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                for each in (process, *process.children(recursive=True)):
                    cpu_s += sum(each.cpu_times()[:4])  # user and system, its own and of ended children
        return sum(rank.operations for rank in self.ranks), cpu_s

    # What follows runs in the thread that starts the parent.

    def _run(self, command: list[str]) -> None:
        exits: dict[int, int | None] = {}
        try:
            with self._theirs:
                self._parent = subprocess.Popen(
                    command, pass_fds=[self._theirs.fileno()], stdin=subprocess.DEVNULL
                )
            exits = self._read_registry(self._parent)
        except Exception:  # any: it becomes part of the error of `launch`, or of the ranks' loss
            self._launch_error = traceback.format_exc()
        with self._changed:
            self._exits = exits
            self._changed.notify_all()
        # The parent dies with this thread, so wait until it has ended, unless reading its messages failed.
        if exits and self._parent is not None:
            self._parent.wait()

    def _read_registry(self, parent: subprocess.Popen[bytes]) -> dict[int, int | None]:
        """Process messages until the parent ends; return how the processes that it started have ended."""
        self._registry.settimeout(TICK_S)
        while True:
            status = parent.poll()  # before the read, so that the parent's last message is read
            try:
                data, descriptors, _, _ = socket.recv_fds(self._registry, 1 << 17, 2)
            except ConnectionResetError:
                # The parent ended before it read its plan. The next read returns what the parent sent last.
                continue
            except TimeoutError:
                if status is not None:
                    return {parent.pid: status}
                continue
            if not data:  # the parent and every rank have ended
                return {parent.pid: parent.wait()}
            message = json.loads(data)
            with self._changed:
                if message["kind"] == "hello":
                    self._add(RankInfo(*message["rank_info"]), message["pid"], descriptors)
                elif message["kind"] == "lost":
                    self._last_errors[message["pid"]] = message["error"]
                else:
                    self._launch_error = message["error"]
                    return {int(pid): code for pid, code in message["exits"].items()}
                self._changed.notify_all()

    def _add(self, info: RankInfo, pid: int, descriptors: list[int]) -> None:
        control, *outputs = descriptors
        output = outputs[0] if outputs else os.memfd_create("no_output")
        rank = RankProcess(info, pid, Channel(socket.socket(fileno=control), RANK_MESSAGES), output)
        self.ranks.append(rank)
        self.ranks.sort(key=lambda each: each.info.local_rank)
        name = f"xla-rank-{info.rank}"
        threading.Thread(target=self._listen, args=(rank,), name=name, daemon=True).start()

    # What follows runs in a thread for each rank.

    def _listen(self, rank: RankProcess) -> None:
        try:
            self._receive(rank)
            with self._changed:
                self._changed.wait_for(lambda: self._exits is not None, EXIT_REASON_TIMEOUT_S)
                loss = self._loss_of(rank)
        except MalformedMessage as error:
            loss = FailureKind.DIED, str(error)
        except Exception:  # any: the rank's thread in the host actor has failed, and nothing else listens
            loss = FailureKind.DIED, f"its host actor failed:\n{traceback.format_exc()}"
        with self._changed:
            rank.loss = loss[0], f"process {rank.pid}: {loss[1]}"
            self._changed.notify_all()
        self._on_loss(rank)

    def _receive(self, rank: RankProcess) -> None:
        there = True
        while there:
            messages, there = rank.channel.receive(None)
            rank.last_heard = time.monotonic()
            for message in messages:
                match message["kind"]:
                    case "alive":
                        rank.operations = message["operations"]
                    case "stack" | "reset_done":
                        with self._changed:
                            rank.replies[message["kind"]] = message
                            self._changed.notify_all()
                    case _:
                        self._on_message(rank, message)

    def _loss_of(self, rank: RankProcess) -> tuple[FailureKind, str]:
        """Return how a rank has ended: by itself, or because another one did."""
        exits = self._exits or {}
        own = rank.pid in first_to_die(exits) or rank.pid not in exits
        text = describe_exit(exits.get(rank.pid))
        if rank.pid not in exits and (exits or self._launch_error):
            text = f"it ended with the parent of this host's ranks:\n{self._exit_reason()}"
        last = (self._last_errors.get(rank.pid) or rank.last_output()) if own else ""
        kind = FailureKind.DIED if own else FailureKind.DISCONNECTED
        return kind, f"{text}\nIts last output:\n{last}" if last else text

    def _exit_reason(self) -> str:
        exits = self._exits or {}
        first = sorted(first_to_die(exits))
        errors = {pid: self._last_errors.get(pid, "") for pid in first}
        own = [f"process {pid}: {describe_exit(exits[pid])}\n{errors[pid]}".rstrip() for pid in first]
        # A process's own exception is the cause; the broken pool is a consequence.
        return "\n".join(own if any(errors.values()) else [*own, self._launch_error]).strip()


def suspended_below(pid: int) -> list[int]:
    """Return the pids of those descendants of a process that a signal has suspended."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                found.append(process.pid)
    return found


def describe_exit(code: int | None) -> str:
    """Return how a process ended, and the usual cause.

    >>> describe_exit(3)
    'it exited with status 3'
    >>> describe_exit(-15)
    'it was ended by SIGTERM'
    >>> describe_exit(-11)[:52]
    'it was ended by SIGSEGV (segmentation fault). On a T'
    >>> describe_exit(-9)[:53]
    'it was ended by SIGKILL. The kernel killed it since m'
    """
    if code is None:
        return "it ended in an unknown way"
    if code >= 0:
        return f"it exited with status {code}"
    number = signal.Signals(-code)
    return f"it was ended by {number.name}{_USUAL_CAUSES.get(number, '')}"


def first_to_die(exits: Mapping[int, int | None]) -> set[int]:
    """Return the pids of processes that ended by themselves; a pool then ends the others with SIGTERM.

    >>> first_to_die({10: -15, 11: -11, 12: -15})
    {11}
    >>> first_to_die({10: -15, 11: 0})  # os._exit(0) in the training function
    {11}
    >>> first_to_die({10: 0, 11: 7})
    {11}
    >>> first_to_die({10: -15}), first_to_die({10: None})
    ({10}, {10})
    """
    own = {pid for pid, code in exits.items() if code not in (0, None, -signal.SIGTERM)}
    left = {pid for pid, code in exits.items() if code == 0}
    return own or left or set(exits)
