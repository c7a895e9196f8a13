"""Runs in a thread of the host actor: owns the parent process and the ranks, and receives their messages."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from horovod_tune.channel.framing import Channel
from horovod_tune.channel.packing import MalformedMessage
from horovod_tune.channel.schema import RANK_MESSAGES
from horovod_tune.files.process_start import process_start
from horovod_tune.xla.hang_detector import Activity
from horovod_tune.xla.runtime import LaunchPlan

TICK_S = 0.5
# How long the parent may take to report how a rank ended.
EXIT_REASON_TIMEOUT_S = 5.0
_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
_BOOT += "import horovod_tune.xla.parent as p; "
_BOOT += "p.main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))"
_TAIL_BYTES = 16000
# How the long last line of Python's fault handler begins.
_NOISE = "Extension modules: "

_USUAL_CAUSES = {
    signal.SIGSEGV: " (segmentation fault). On a TPU host the usual cause is a lack of memory: let the "
    "ranks load less, or share one model (horovod_tune.with_parameters).",
    signal.SIGKILL: ". The kernel killed it since memory ran out (`dmesg` shows it), or another process did.",
}


@dataclass
class RankProcess:
    """One rank, as its host actor sees it."""

    ordinal: int
    world_size: int
    local_ordinal: int
    local_size: int
    pid: int
    process_started: float
    channel: Channel
    output: int | None
    last_heard: float = field(default_factory=time.monotonic)
    cpu_s: float = -1.0
    messages: int = 0
    operations: int = 0
    has_ended: bool = False
    tail: bytearray = field(default_factory=bytearray)

    def send(self, kind: str, **fields: Any) -> None:
        """Send the rank a message, unless it has ended, which the supervisor reports."""
        with contextlib.suppress(OSError):
            self.channel.send(kind, **fields)


def family_cpu_s(pid: int) -> float:
    """Return the CPU time in s of a process, of all below it, and of those that they have waited for."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    used_s = 0.0
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            used_s += sum(each.cpu_times()[:4])  # user and system, its own and of its children
    return used_s


class Supervisor:
    """The ranks of one host.

    Its callbacks run in the supervising thread: ``on_message(rank, message)`` with checked messages,
    ``on_output(rank, text)``, and ``on_loss(rank, text, own)`` when a rank has died, where ``own``
    is False if it died because of another.
    """

    def __init__(
        self,
        runtime_path: str,
        *,
        heartbeat_s: float,
        on_message: Callable[[RankProcess, dict[str, Any]], None],
        on_output: Callable[[RankProcess, bytes], None],
        on_loss: Callable[[RankProcess, str, bool], None],
    ) -> None:
        self._runtime_path = runtime_path
        self._heartbeat_s = heartbeat_s
        self._on_message, self._on_output, self._on_loss = on_message, on_output, on_loss
        self._registry, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._selector = selectors.DefaultSelector()
        self._parent: subprocess.Popen[bytes] | None = None
        self._exits: dict[int, int | None] | None = None
        self._deaths: dict[int, float] = {}
        self._launch_error = ""
        self._last_errors: dict[int, str] = {}
        self._changed = threading.Condition()
        self.ranks: list[RankProcess] = []
        # A process that requested to die with its parent dies with the *thread* that started it, so
        # this thread lives as long as the actor does.
        self._thread = threading.Thread(target=self._run, name="xla-supervisor", daemon=True)
        self._thread.start()

    def launch(self, plan: LaunchPlan) -> None:
        """Start the ranks; `wait_until_up` waits for them."""
        # `wait_until_up` raises why a parent has ended.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._registry.send(pickle.dumps(plan))

    def wait_until_up(self, wait_s: float) -> list[RankProcess]:
        """Return the host's ranks when all have started; an empty list after ``wait_s``.

        Raises:
            RuntimeError: they could not start; has the parent's own error.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_up() or self._exits is not None, timeout=wait_s)
            if self._is_up():
                return self.ranks
            if self._exits is not None:
                raise RuntimeError(self._exit_reason())
            return []

    def processes(self) -> list[tuple[int, float]]:
        """Return (pid, `process_start`) of the parent and of every rank."""
        with self._changed:
            pids = [(rank.pid, rank.process_started) for rank in self.ranks]
        if self._parent is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                pids.append((self._parent.pid, process_start(self._parent.pid)))
        return pids

    def _is_up(self) -> bool:
        return bool(self.ranks) and len(self.ranks) == self.ranks[0].local_size

    def _exit_reason(self) -> str:
        exits = self._exits or {}
        first = sorted(first_to_die(exits))
        errors = {pid: self._last_errors.get(pid, "") for pid in first}
        own = [f"process {pid}: {describe_exit(exits[pid])}\n{errors[pid]}".rstrip() for pid in first]
        # A process's own exception is the cause; that its pool broke is a consequence.
        return "\n".join(own if any(errors.values()) else [*own, self._launch_error]).strip()

    def _run(self) -> None:
        try:
            self._supervise()
        except Exception:
            # The ranks end with this thread, so nothing has to wait for them.
            text = traceback.format_exc()
            with self._changed:
                self._exits = self._exits or {}
                self._launch_error = text
                self._changed.notify_all()
            for rank in self.ranks:
                if not rank.has_ended:
                    rank.has_ended = True
                    self._on_loss(rank, f"its host actor's supervisor thread failed:\n{text}", True)

    def _supervise(self) -> None:
        command = [sys.executable, "-c", _BOOT, json.dumps(sys.path), str(self._theirs.fileno())]
        self._parent = subprocess.Popen(
            [*command, self._runtime_path, str(os.getpid()), str(self._heartbeat_s)],
            pass_fds=[self._theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        self._theirs.close()
        self._selector.register(self._registry, selectors.EVENT_READ, self._read_registry)
        self._registry.setblocking(False)
        while True:
            for key, _ in self._selector.select(timeout=TICK_S):
                key.data()
            self._check_parent()
            self._report_deaths()

    def _read_registry(self) -> bool:
        """Take one message of the parent or a rank; return False if there is none."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._registry, 1 << 17, 2)
        except ConnectionResetError:
            # The parent ended before it read its plan. This is raised once; what it sent last is read next.
            return True
        except BlockingIOError:
            return False
        if not data:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._registry)  # the parent and every rank have ended
            return False
        message = json.loads(data)
        with self._changed:
            if message["kind"] == "hello":
                self._add(message, descriptors)
            elif message["kind"] == "lost":
                self._last_errors[message["pid"]] = message["error"]
            else:
                self._exits = {int(pid): code for pid, code in message["exits"].items()}
                self._launch_error = message["error"]
            self._changed.notify_all()
        return True

    def _add(self, hello: dict[str, Any], descriptors: list[int]) -> None:
        del hello["kind"]
        control, *output = descriptors
        channel = Channel(socket.socket(fileno=control), RANK_MESSAGES)
        rank = RankProcess(**hello, channel=channel, output=output[0] if output else None)
        self.ranks.append(rank)
        self.ranks.sort(key=lambda each: each.local_ordinal)
        self._selector.register(rank.channel, selectors.EVENT_READ, lambda: self._receive(rank))
        if rank.output is not None:
            os.set_blocking(rank.output, False)
            self._selector.register(rank.output, selectors.EVENT_READ, lambda: self._read_output(rank))

    def _receive(self, rank: RankProcess) -> None:
        try:
            messages, there = rank.channel.receive(0)
        except MalformedMessage as error:
            self._selector.unregister(rank.channel)
            self._on_loss(rank, str(error), True)
            rank.has_ended = True
            return
        rank.last_heard = time.monotonic()
        for message in messages:
            if message["kind"] in ("finished", "failed"):
                self._read_output(rank)  # what it printed goes out before its last message
            if message["kind"] == "alive":
                rank.operations = message["operations"]
                continue
            rank.messages += message["kind"] != "stack"
            self._on_message(rank, message)
        if not there:
            self._selector.unregister(rank.channel)
            self._read_output(rank)
            self._deaths[rank.ordinal] = time.monotonic()

    def _read_output(self, rank: RankProcess) -> None:
        while rank.output is not None:
            try:
                text = os.read(rank.output, 1 << 16)
            except BlockingIOError:
                return
            if not text:
                self._selector.unregister(rank.output)
                os.close(rank.output)
                rank.output = None
                return
            rank.tail += text
            del rank.tail[:-_TAIL_BYTES]
            self._on_output(rank, text)

    def _check_parent(self) -> None:
        if self._exits is None and self._parent is not None and self._parent.poll() is not None:
            while self._read_registry():
                pass
            with self._changed:
                if self._exits is None:
                    self._exits = {self._parent.pid: self._parent.returncode}
                self._changed.notify_all()

    def _report_deaths(self) -> None:
        """Report which ranks have ended, as soon as the parent has reported how."""
        for rank in self.ranks:
            died = self._deaths.get(rank.ordinal)
            if rank.has_ended or died is None:
                continue
            if self._exits is None and time.monotonic() - died < EXIT_REASON_TIMEOUT_S:
                continue
            rank.has_ended = True
            exits = self._exits or {}
            own = rank.pid in first_to_die(exits) or rank.pid not in exits
            text = describe_exit(exits.get(rank.pid))
            if exits and rank.pid not in exits:
                text = f"it ended with the parent of this host's ranks:\n{self._exit_reason()}"
            printed = bytes(rank.tail).decode("utf-8", "replace").splitlines()
            last = "\n".join(line for line in printed if not line.startswith(_NOISE)).strip()
            last = self._last_errors.get(rank.pid) or last
            self._on_loss(rank, f"{text}\nIts last output:\n{last}" if last and own else text, own)

    def activity(self) -> Activity:
        """Return what the ranks have done so far."""
        # TPU v2 and v3 have two ranks in a process.
        pids = {rank.pid for rank in self.ranks if not rank.has_ended}
        return Activity(
            messages=sum(rank.messages for rank in self.ranks),
            operations=sum(rank.operations for rank in self.ranks),
            cpu_s=sum(family_cpu_s(pid) for pid in pids),
        )

    def unresponsive(self, timeout_s: float) -> list[RankProcess]:
        """Return the ranks that have neither sent anything nor computed for ``timeout_s``.

        A rank that holds Python's lock while it compiles cannot send, but it computes.
        """
        now, unresponsive = time.monotonic(), []
        for rank in self.ranks:
            if rank.has_ended or now - rank.last_heard < 2 * self._heartbeat_s:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                used_s = sum(psutil.Process(rank.pid).cpu_times()[:2])
                if used_s > rank.cpu_s >= 0:
                    rank.last_heard = now
                rank.cpu_s = used_s
            if now - rank.last_heard > timeout_s:
                unresponsive.append(rank)
        return unresponsive


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
