"""Runs in each training actor: starts its ranks' processes, receives what they send, knows how they ended.

One thread watches: it reads the ranks' messages and output, and the template's notices of ranks that ended.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import selectors
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import psutil

from horovod_tune.actors.host_template import HostTemplate
from horovod_tune.actors.rank_output import RankOutput
from horovod_tune.channel.framing import RANK_MESSAGES, Channel
from horovod_tune.channel.packing import MalformedMessage
from horovod_tune.channel.report_channel import ChannelToken, hand_over
from horovod_tune.errors import LAST_OUTPUT, StartFailed, encodable
from horovod_tune.messages import CheckpointPlace
from horovod_tune.rank.template import TEMPLATE_VARIABLE
from horovod_tune.transfer.host_copies import ask_node

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")

TICK_S = 0.5
_LAST_LINES = 20
_LINE_LENGTH = 500
# Lines of Ray's and Python's native stacks, and the list of all extension modules.
_NATIVE_STACK = re.compile(
    r"(\[.*logging\.cc:\d+: )?(\*\*\* SIG|PC: @| +@ |Stack trace: )| *\S+\.so\S*\(.*\) \[0x|Extension mod"
)


class RankProcess:
    """One rank's process. ``on_message`` is called for each message that is neither a request nor a reply."""

    def __init__(self, on_message: Callable[[dict[str, Any]], None]) -> None:
        self._on_message = on_message
        self.output = RankOutput()
        ours, theirs = socket.socketpair()
        self.control = Channel(ours, RANK_MESSAGES)
        # The coordinator's end of the rank's channel, until it is handed over.
        self.channel, channel_end = socket.socketpair()
        self._theirs = theirs, channel_end
        self.pid = 0
        # The exit status, or the negative number of the signal that ended the process; None while it runs.
        self.status: int | None = None
        self.has_ended = threading.Event()
        # Why the process is lost although it has not said so; empty if it ended by itself.
        self.reason = ""
        # True if it was killed because a signal had stopped it; by the monotonic clock, since when it is.
        self.was_suspended = False
        self._suspended_s: float | None = None
        self._asked: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._oom_kills = oom_kills()
        # The rank's requests that are being answered.
        self.unanswered: set[int] = set()

    def start(self, template: HostTemplate) -> None:
        """Fork the process; raises as `HostTemplate.start_rank`."""
        control, channel = self._theirs
        try:
            self.pid = template.start_rank([control.fileno(), self.output.write_end, channel.fileno()])
        except StartFailed:
            self.end(None)
            raise
        finally:
            control.close()
            channel.close()
            os.close(self.output.write_end)

    def hand_over_channel(self, token: ChannelToken | None) -> None:
        """Give the coordinator its end of the rank's channel. Where that fails, reports go through Ray."""
        with self.channel:
            if token is not None:
                try:
                    hand_over(token, self.channel)
                except OSError as error:  # the coordinator may be in another container, for example
                    logger.warning("reports go through Ray: the coordinator cannot be reached: %s", error)

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message, unless the process has ended, which is reported by its end."""
        with contextlib.suppress(OSError):
            self.control.send(kind, **fields)

    def ask(
        self,
        request: Callable[Concatenate[Any, _P], _T],
        timeout_s: float,
        *arguments: _P.args,
        **named: _P.kwargs,
    ) -> _T:
        """Call, in the process, the method ``request`` of its `Rank`, or one of its backend's `answers`.

        Raises:
            RuntimeError: it failed there, or the process has ended.
            TimeoutError: no reply came in time; a rank that holds the GIL, or is suspended, cannot reply.
        """
        number, answer = next(self._numbers), Future[_T]()
        self._asked[number] = answer
        if self.has_ended.is_set():
            raise RuntimeError(f"the rank's process {self.pid} has ended")
        self.send("ask", id=number, request=request.__name__, arguments=list(arguments), named=named)
        try:
            return answer.result(timeout_s)
        finally:
            self._asked.pop(number, None)

    def receive(self) -> bool:
        """Handle the messages that have arrived; return False once the other end is closed."""
        try:
            messages, is_open = self.control.receive(0)
            for message in messages:
                self._handle(message)
        except MalformedMessage as error:
            self.kill(f"it sent a malformed message: {error}")
            return False
        return is_open

    def _handle(self, message: dict[str, Any]) -> None:
        match message:
            case {"kind": "reply", "id": number, "value": value, "error": error}:
                if (answer := self._asked.pop(number, None)) is not None:
                    answer.set_exception(RuntimeError(error)) if error else answer.set_result(value)
            case {"kind": "fetch" | "stall_report", "id": number}:
                self.unanswered.add(number)
                threading.Thread(target=self._answer, args=(message,), daemon=True).start()
            case _:
                # The rank has flushed its output before: it precedes the message.
                self.output.drain()
                self._on_message(message)

    def _answer(self, message: dict[str, Any]) -> None:
        value: Any = None
        error = ""
        try:
            match message:
                case {"kind": "fetch", "path": path, "node_id": node_id, "target": target}:
                    value = ask_node(CheckpointPlace(path, node_id=node_id), target)
                case {"kind": "stall_report"}:
                    self.output.drain()
                    value = self.output.stall_report()
        except Exception as problem:  # any: the rank raises it
            error = f"{type(problem).__name__}: {problem}"
        self.unanswered.discard(message["id"])
        self.send("reply", id=message["id"], value=value, error=encodable(error))

    def kill(self, reason: str = "") -> None:
        """End the process and its group; the template ends what has left the group."""
        self.reason = self.reason or reason
        for send in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                send(self.pid, signal.SIGKILL)

    def end(self, status: int | None) -> None:
        """Record how the process has ended, after its last messages and output."""
        while self.receive() and self.control.has_data():
            pass
        self.output.drain()
        self.output.close()
        self.status = status
        self.has_ended.set()
        for answer in list(self._asked.values()):
            with contextlib.suppress(Exception):  # it has been answered at this moment
                answer.set_exception(RuntimeError(f"the rank's process {self.pid} has ended"))
        self.control.close()
        self.channel.close()

    def is_suspended(self) -> bool:
        """Return True if a signal has stopped the process."""
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        except psutil.NoSuchProcess:
            return False

    def check_suspended(self, timeout_s: float) -> None:
        """Kill the process if a signal has stopped it for ``timeout_s``, as seen by calls of this method."""
        if not self.is_suspended():
            self._suspended_s = None
            return
        now = time.monotonic()
        self._suspended_s = now if self._suspended_s is None else self._suspended_s
        if now - self._suspended_s >= timeout_s:
            self.was_suspended = True
            self.kill(f"no heartbeat for {timeout_s:g} s (timeout_s): a signal has stopped it")

    def exit_text(self) -> str:
        """Return how the process ended and its last lines, for an error."""
        text = self.reason or describe_exit(self.status, self._oom_kills, oom_kills())
        return f"process {self.pid}: {text}\n{last_lines(self.output.tail())}".rstrip()


class Supervisor:
    """Watches the ranks that this actor starts; kills those that a signal has stopped for ``timeout_s``."""

    def __init__(
        self, template: HostTemplate, timeout_s: float, on_end: Callable[[RankProcess], None]
    ) -> None:
        self._template, self._timeout_s, self._on_end = template, timeout_s, on_end
        self._selector = selectors.DefaultSelector()
        self._selector.register(template, selectors.EVENT_READ)
        self._ranks: dict[int, RankProcess] = {}
        self._starting = threading.Lock()
        # True once the template has ended, and its ranks with it.
        self.is_lost = False
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def start(self, rank: RankProcess) -> None:
        """Start a rank's process; raises as `HostTemplate.start_rank`."""
        with self._starting:  # so that its end is not handled before it is known
            rank.start(self._template)
            self._ranks[rank.pid] = rank
            for each in (rank.control, rank.output):
                self._selector.register(each, selectors.EVENT_READ, rank)

    def _watch(self) -> None:
        while not self.is_lost:
            found = self._selector.select(TICK_S)
            try:
                for key, _ in found:
                    if key.data is not None:
                        self._read(key)
                with self._starting:
                    notices = list(self._template.notices())
                for notice in notices:
                    self._note(notice)
                if not found:
                    for rank in list(self._ranks.values()):
                        rank.check_suspended(self._timeout_s)
            except Exception:  # any: it would end this thread, and nothing else watches
                for rank in list(self._ranks.values()):
                    rank.kill(f"its training actor failed:\n{traceback.format_exc()}")

    def _read(self, key: selectors.SelectorKey) -> None:
        rank: RankProcess = key.data
        if key.fileobj is rank.control:
            if not rank.receive():
                self._selector.unregister(rank.control)
        else:
            rank.output.drain()
            if not rank.output.is_open:
                self._selector.unregister(key.fileobj)

    def _note(self, notice: dict[str, Any]) -> None:
        if notice["kind"] == "ended":
            self._end(self._ranks[notice["pid"]], notice["status"])
        elif notice["kind"] == "gone":
            self.is_lost = True
            for rank in list(self._ranks.values()):
                rank.kill(
                    f"the process that forks ranks ({self._template.pid}) has ended, and its ranks with it"
                )
                self._end(rank, None)
            end_processes_of(self._template.token)
            self._template.remove_file()

    def _end(self, rank: RankProcess, status: int | None) -> None:
        del self._ranks[rank.pid]
        for each in (rank.control, rank.output):
            with contextlib.suppress(KeyError, ValueError):  # closed before
                self._selector.unregister(each)
        rank.end(status)
        self._on_end(rank)


def end_processes_of(token: str) -> None:
    """Kill what a template that was killed has left: its ranks end with it, but not what these started.

    Every process below it has its environment, or that of a rank, in which the token is.
    """
    mark = f"{TEMPLATE_VARIABLE}={token}".encode()
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if mark in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                process.kill()


def oom_kills() -> int | None:
    """Return how many processes of this one's cgroup the kernel has ended for lack of memory, if known."""
    with contextlib.suppress(OSError, ValueError):
        groups = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
        places = [f"/sys/fs/cgroup{groups.get('', '')}/memory.events", "/sys/fs/cgroup/memory.events"]
        places += [f"/sys/fs/cgroup/memory{groups.get('memory', '')}/memory.oom_control"]
        for place in places:
            with contextlib.suppress(OSError, KeyError):  # Linux before 4.13 does not count
                counts = dict(line.split() for line in Path(place).read_text().splitlines())
                return int(counts["oom_kill"])
    return None


def describe_exit(status: int | None, oom_before: int | None = None, oom_after: int | None = None) -> str:
    """Return how a process ended, and the cause if the kernel knows it.

    ``oom_before`` and ``oom_after`` are the `oom_kills` of its cgroup.

    >>> describe_exit(3)
    'it exited with status 3'
    >>> describe_exit(-15)
    'it was ended by SIGTERM'
    >>> describe_exit(-9, 0, 1)
    'it was ended by SIGKILL: memory ran out (oom_kill of its cgroup rose from 0 to 1)'
    >>> describe_exit(-9, 1, 1)
    'it was ended by SIGKILL, which another process sent: memory did not run out'
    """
    if status is None:
        return "it ended in an unknown way"
    if status >= 0:
        return f"it exited with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    text = f"it was ended by {name}"
    if -status == signal.SIGSEGV:
        return f"{text} (segmentation fault)"
    if -status != signal.SIGKILL:
        return text
    if oom_before is None or oom_after is None:
        return f"{text}: memory ran out (see `dmesg`), or another process sent it"
    if oom_after > oom_before:
        return f"{text}: memory ran out (oom_kill of its cgroup rose from {oom_before} to {oom_after})"
    return f"{text}, which another process sent: memory did not run out"


def last_lines(output: bytes) -> str:
    r"""Return the last lines that a process printed before it died.

    Native stacks of a crash are left out; that of Python's functions follows them.

    >>> output = b"*** SIGABRT received at time=1\n    @ 0x7f  (unknown)\nFatal Python error: Aborted\n"
    >>> print(last_lines(output))
    its last output was
      Fatal Python error: Aborted
    """
    lines = [line[:_LINE_LENGTH] for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    lines = [f"  {line}" for line in lines if not _NATIVE_STACK.match(line)]
    return "\n".join([LAST_OUTPUT, *lines[-_LAST_LINES:]]) if lines else ""
