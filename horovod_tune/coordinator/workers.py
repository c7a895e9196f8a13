"""Runs in the coordinator: its record of each worker, the queue of what they send, calls, and their end."""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horovod_tune.channel.packing import MalformedMessage
from horovod_tune.channel.report_channel import CoordinatorChannel
from horovod_tune.coordinator.trial_state import Member
from horovod_tune.errors import StartFailed, TrainingFailed
from horovod_tune.files.process_start import process_start
from horovod_tune.messages import Report, WorkerInfo
from horovod_tune.spec.trial_spec import START_S_PER_WORKER, start_timeout_s

logger = logging.getLogger(__name__)

# How long a killed actor's process may take to end before it is killed by its pid.
EXIT_TIMEOUT_S = 3.0
REMOTE_EXIT_TIMEOUT_S = 10.0  # how long to wait until another node has done this
LOST_NODE_TIMEOUT_S = 2.0  # the same for a node that may be down


@dataclass(eq=False, kw_only=True)
class Worker(Member):
    """The coordinator's record of one worker, and the calls to it.

    Attributes:
        channel: its socket to this process; None, or closed, if it has none in this world.
        is_polled: True while a reply to `poll` is pending.
    """

    actor: Any
    channel: CoordinatorChannel | None = None
    is_polled: bool = False
    is_reply_requested: bool = False
    # By the monotonic clock: when an immediate reply was last requested, and when the reply is due.
    _requested_s: float = float("-inf")
    _due_s: float = 0.0

    def __post_init__(self) -> None:
        # The reply to `describe`, as an ObjectRef.
        self.description = self.actor.describe.remote()

    def poll(self, events: EventQueue, wait_s: float) -> None:
        """Request the worker's messages; it replies into ``events``, if it has none after ``wait_s``."""
        assert not self.is_polled, "the reply to the first poll would be lost"
        self.is_polled, self.is_reply_requested = True, False
        self._due_s = time.monotonic() + wait_s
        events.expect(self.actor.poll.remote(wait_s), self)

    def request_reply(self, *, every_s: float = 0.0) -> None:
        """Request an immediate reply to the poll, unless that was done less than ``every_s`` ago."""
        now = time.monotonic()
        if self.is_polled and not self.is_reply_requested and now - self._requested_s >= every_s:
            self.is_reply_requested, self._requested_s, self._due_s = True, now, min(self._due_s, now)
            self.actor.reply_now.remote()

    def overdue_s(self, listening_since: float) -> float:
        """Return by how many seconds the worker's reply is overdue, 0 if it is not.

        ``listening_since`` is when this process began to receive messages, by the monotonic clock: time
        before that (Tune was deciding) does not count.
        """
        if not self.is_polled:
            return 0.0
        return max(0.0, time.monotonic() - max(self._due_s, listening_since))


# A reply with its worker; a report with its trial's `TrialRequest.run`.
Replies = list[tuple[Worker, Future[Any]]]
Reports = list[tuple[int, Report]]


class EventQueue:
    """Queue of workers' replies and of reports through channels; only one thread may `wait`."""

    def __init__(self) -> None:
        self._replies: deque[tuple[Worker, Future[Any]]] = deque()
        # Ray's thread writes here when a reply arrives, so that one `select` waits for replies and channels.
        self._wakeup_r, self._wakeup_w = socket.socketpair()
        self._wakeup_r.setblocking(False)
        self._wakeup_w.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup_r, selectors.EVENT_READ)

    def expect(self, ref: Any, worker: Worker) -> None:
        """Add the result of ``ref`` to the queue when it arrives, as a reply of ``worker``."""

        def arrived(reply: Future[Any]) -> None:
            self._replies.append((worker, reply))
            try:
                self._wakeup_w.send(b"!")
            except OSError:  # its buffer is full, so `wait` wakes up anyway, or this queue is gone
                return

        ref.future().add_done_callback(arrived)

    def add_channel(self, worker: Worker, channel: CoordinatorChannel) -> None:
        """Receive reports through the worker's channel."""
        worker.channel = channel
        self._selector.register(channel, selectors.EVENT_READ, worker)

    def wait(self, timeout_s: float) -> tuple[Replies, Reports]:
        """Wait until something arrives, for at most ``timeout_s``, and return everything that has arrived.

        Raises:
            TrainingFailed: a rank sent something other than a report through its channel.
        """
        replies: Replies = []
        reports: Reports = []
        for key, _ in self._selector.select(timeout_s):
            worker = key.data
            if worker is None:
                self._wakeup_r.recv(4096)
                while self._replies:  # only this thread takes from it
                    replies.append(self._replies.popleft())
                continue
            try:
                reports += worker.channel.receive()
            except MalformedMessage as error:
                raise TrainingFailed(f"received a malformed message from {worker.name}: {error}") from error
            if not worker.channel.is_open:
                self._selector.unregister(key.fileobj)
        return replies, reports

    def close_channels(self, workers: Sequence[Worker]) -> None:
        """Close the workers' open channels; replies continue to arrive."""
        for worker in workers:
            if worker.channel is not None and worker.channel.is_open:
                self._selector.unregister(worker.channel)
                worker.channel.close()


def replies_to(calls: Sequence[Any], timeout_s: float) -> list[Any]:
    """Return each call's reply, or the RayError with which it failed: GetTimeoutError if it took too long."""
    if calls:
        ray.wait(list(calls), num_returns=len(calls), timeout=timeout_s)
    replies: list[Any] = []
    for call in calls:
        try:
            replies.append(ray.get(call, timeout=0))
        except RayError as error:
            replies.append(error)
    return replies


def call_all(
    workers: Sequence[Worker], calls: Sequence[Any], doing: str, *, timeout_s: float, times: int = 1
) -> list[Any]:
    """Return every worker's reply; ``calls`` are in the order of ``workers``, ``doing`` is for errors.

    Raises:
        StartFailed: a worker did not reply within ``times`` times `start_timeout_s`, or its call failed.
    """
    once_s = start_timeout_s(timeout_s, len(workers))
    for waited in range(1, times + 1):
        replies = replies_to(calls, once_s)
        pairs = zip(workers, replies, strict=True)
        errors = {worker: reply for worker, reply in pairs if isinstance(reply, RayError)}
        late = [worker for worker, error in errors.items() if isinstance(error, GetTimeoutError)]
        if dead := [worker for worker in errors if worker not in late]:
            error = errors[dead[0]]
            if isinstance(error, StartFailed):  # its own message says everything; Ray's adds stacks of ours
                cause = getattr(error, "cause", error)
                raise StartFailed(f"{_names(dead)} failed {doing}: {cause}") from None
            raise StartFailed(f"{_names(dead)} failed {doing}: {error}") from error
        if not late:
            return replies
        if waited < times:
            logger.warning(
                "%d of %d training actors have taken longer than %g s %s; they have %g s more: %s",
                *(len(late), len(calls), waited * once_s, doing, (times - waited) * once_s),
                _names(late),
            )
    multiplied = f"{times} times " if times > 1 else ""
    raise StartFailed(
        f"{len(late)} of {len(calls)} training actors took longer than {times * once_s:g} s {doing} ("
        f"{multiplied}timeout_s={timeout_s:g} s and {START_S_PER_WORKER} s for each actor): {_names(late)}"
    )


def _names(workers: Sequence[Worker]) -> str:
    return ", ".join(dict.fromkeys(worker.name for worker in workers))


def end_workers(
    workers: Sequence[Worker],
    *,
    below: Sequence[WorkerInfo] = (),
    lost_nodes: Collection[str] = (),
    wait: bool = True,
) -> None:
    """Kill the workers' actors; wait until their processes and those that they started (``below``) are gone.

    Ray's request to exit does not end a stopped process (SIGSTOP), so processes that remain are killed by
    pid, on their own node. The wait for a node in ``lost_nodes`` is only LOST_NODE_TIMEOUT_S: it may be down
    before Ray marks it as dead. Without ``wait``, only this node's processes are waited for.
    """
    for worker in workers:
        ray.kill(worker.actor, no_restart=True)
    targets: dict[str, list[tuple[int, float]]] = {}
    for info in [*(worker.info for worker in workers if worker.info is not None), *below]:
        targets.setdefault(info.node_id, []).append((info.pid, info.process_started))
    here = targets.pop(ray.get_runtime_context().get_node_id(), []) if targets else []
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]} if targets else set()
    pending = []
    for node in alive.intersection(targets):
        task = _task_on(node, end_processes)
        wait_s = LOST_NODE_TIMEOUT_S if node in lost_nodes else REMOTE_EXIT_TIMEOUT_S
        pending.append((wait_s, task.remote(targets[node])))
    end_processes(here)
    began = time.monotonic()
    for wait_s, ref in pending if wait else ():
        # If the node went down, its processes have ended too; Ray logs that.
        with contextlib.suppress(RayError):
            ray.get(ref, timeout=max(0.0, began + wait_s - time.monotonic()))


def _task_on(node_id: str, function: Callable[..., Any]) -> Any:
    strategy = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(function).options(scheduling_strategy=strategy)


def end_processes(processes: Sequence[tuple[int, float]]) -> None:
    """Wait until these local processes, as (pid, `process_start`), are gone; kill those that remain."""
    end = time.monotonic() + EXIT_TIMEOUT_S
    waiting = []
    for pid, started in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            # Pids are reused: another start time means another process. Before psutil 7.2, this sets the boot
            # time by which `kill` recognises the process.
            if abs(process_start(pid) - started) < 1.0:
                process = psutil.Process(pid)
                waiting.append(process)
                if process.status() == psutil.STATUS_STOPPED:
                    process.kill()
    _, left = psutil.wait_procs(waiting, timeout=max(0.0, end - time.monotonic()))
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=1.0)
