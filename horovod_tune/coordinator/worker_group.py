"""The coordinator's side of a trial: handles its workers' reports, logs and failures, and ends it.

Runs in one thread. Every wait has an end: a worker replies to `poll` even if it has nothing to send; one that
has not replied for the trial's ``timeout_s`` is lost, which `world` handles.

Step 3 of 5 of a report's path: `next_event()` returns it to `coordinator.py`, and the next call
acknowledges it on every rank.
"""

from __future__ import annotations

import logging
import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from horovod_tune.coordinator import failures
from horovod_tune.coordinator.backend_protocol import Launcher
from horovod_tune.coordinator.policy import Limits
from horovod_tune.coordinator.uneven_reports import STACK_INTERVAL_S, UnevenReports
from horovod_tune.coordinator.workers import EventQueue, Worker, replies_to
from horovod_tune.coordinator.world import World
from horovod_tune.errors import MetricsError, TrainingFailed, death_text
from horovod_tune.messages import (
    AwaitedRanks,
    CheckpointPlace,
    Failed,
    FailureKind,
    Finished,
    ImportsSeen,
    LogChunk,
    LongWait,
    NeedsWorld,
    Report,
    TrialRequest,
)
from horovod_tune.ray_compat import queries

logger = logging.getLogger(__name__)

# How long to wait for the cause if it is only known that ranks have lost contact with each other.
ROOT_CAUSE_WAIT_S = 2.0
# How long a stopped training function may take to end before its process is killed.
UNWIND_TIMEOUT_S = 5.0
# How long a process may take to exit once its function has ended: its `atexit` handlers, and its threads.
EXIT_TIMEOUT_S = 30.0
# How long processes may take to end before they are killed if the trial has failed.
CLOSE_TIMEOUT_S = 2.0


class WorkerGroup:
    """The workers, which run one trial after another."""

    def __init__(self, launcher: Launcher, limits: Limits) -> None:
        self._events = EventQueue()
        self.world = World(launcher, limits, self._events)
        # The calls of `begin_end`, by worker.
        self._ending: dict[Worker, Any] = {}
        self._has_named_imports = False
        self._experiment_name = ""
        self._run = 0
        self._forget_trial()

    def _forget_trial(self) -> None:
        self.world.forget_trial()
        self._logs: list[LogChunk] = []
        # The ranks that had returned by the previous poll of rank 0.
        self._returned_before: set[int] = set()
        # The `names` of the last `AwaitedRanks` message.
        self._awaited: dict[int, str] = {}
        self._uneven = UnevenReports()

    def begin(self, request: TrialRequest) -> None:
        """Start a trial on all ranks, once the workers have started; raises StartFailed as `World.form`."""
        if not self.world.members:
            self.world.create()
        self._forget_trial()
        self.world.form()
        self._run += 1
        self._experiment_name = request.experiment_name
        self.world.begin(replace(request, run=self._run, is_elastic=self.world.limits.is_elastic))

    def next_event(
        self, checkpoint: CheckpointPlace | None = None, keep_logs: Callable[[], None] = lambda: None
    ) -> Report | Finished:
        """Wait for rank 0's next report, or for the end of the training function on every rank.

        The previous report, whose checkpoint is stored at ``checkpoint``, is acknowledged first. While it
        waits, it calls ``keep_logs``: Tune may kill this process before the next report.

        Raises:
            TrainingFailed: a rank raised, died, stopped responding or lost contact with the others.
        """
        if self.world.reports:
            self._acknowledge(self.world.reports, checkpoint)
        entered = time.monotonic()
        while True:
            if report := self.world.take_report():
                return report
            if self.world.failures:
                raise self._failed()
            if not self.world.running:
                return Finished(0)
            is_ahead = bool(self._uneven.ahead(self.world.reports))
            self._listen(min(self.world.tick_s, STACK_INTERVAL_S) if is_ahead else self.world.tick_s)
            self.world.advance(entered)
            self._check_reports()
            keep_logs()

    def _check_reports(self) -> None:
        """Fail the trial if a rank waits in a report that rank 0 never makes."""
        reports, now = self.world.reports, time.monotonic()
        if not self._uneven.request_is_due(reports, now):
            return
        if found := self._uneven.find(reports, self.world.hosts, self.world.running, now):
            self.world.failures.append(found)
        for worker in self.world.members:
            worker.actor.reply_now.remote()

    def _acknowledge(self, index: int, checkpoint: CheckpointPlace | None) -> None:
        if checkpoint is not None:
            self.world.checkpoint = replace(checkpoint, report=index)
        # The newest checkpoint is part of every acknowledgement, since Ray's calls may arrive out of order.
        newest = self.world.checkpoint
        for worker in self.world.members:
            channel = worker.channel
            if channel is None or not channel.acknowledge(self._run, index, newest):
                worker.actor.acknowledge.remote(self._run, index, newest)

    def _listen(self, wait_s: float) -> None:
        """Handle the messages that arrive within ``wait_s``, and poll the workers again."""
        replies, reports = self._events.wait(wait_s)
        # Reports first: they were sent before the replies that were received in the same wait.
        for run, report in reports:
            if run == self._run:
                self.world.record_report(report)
        for worker, reply in replies:
            if not worker.is_polled:
                continue  # the worker was lost meanwhile
            worker.is_polled = False
            try:
                messages = reply.result()
            except (RayActorError, OutOfMemoryError) as error:
                self.world.lose(worker, FailureKind.DIED, death_text(error))
                continue
            self._take(worker, messages)
        self.world.poll_all()

    def _take(self, worker: Worker, messages: Sequence[Any]) -> None:
        for message in messages:
            match message:
                case Report(metrics=bytes() as pickled):
                    try:
                        metrics = pickle.loads(pickled)
                    except Exception as error:  # of a class that this process cannot import
                        raise MetricsError(
                            f"the metrics that rank 0 reported cannot be read outside of it: {error}. Report "
                            "numbers, strings, and lists or dicts of them"
                        ) from error
                    self.world.record_report(replace(message, metrics=metrics))
                case Report():
                    self.world.record_report(message)
                case Finished(rank=rank):
                    worker.running.discard(rank)
                    self.world.returned.add(rank)
                    if rank == 0:  # the other ranks must not wait for it in further reports
                        for each in self.world.members:
                            each.actor.acknowledge.remote(self._run, math.inf, self.world.checkpoint)
                case Failed(kind=FailureKind.DIED | FailureKind.UNRESPONSIVE as kind, traceback=text) if (
                    self.world.limits.is_elastic
                ):
                    self.world.lose(worker, kind, text, actor_lives=True)
                    return
                case Failed(rank=rank):
                    worker.running.discard(rank)
                    self.world.failures.append(message)
                case LogChunk(rank=rank, stack=stack):
                    self._logs.append(message)
                    if stack:
                        self._uneven.record_stack(rank, stack, time.monotonic())
                case LongWait():
                    self._uneven.record_wait(message)
                case ImportsSeen(seconds=seconds):
                    self._name_imports(seconds)
                case AwaitedRanks(names=names):
                    self._awaited, hosts = names, self.world.hosts
                    # The stall inspector does not say whether a missing rank has returned. Its message may be
                    # as old as the previous poll, so only ranks that had returned then count.
                    for rank in self._returned_before & names.keys() & hosts.keys():
                        if self.world.running:
                            early = failures.returned_early(rank, hosts[rank], names[rank])
                            self.world.failures.append(early)
                case NeedsWorld() if self.world.limits.is_elastic:
                    self._uneven = UnevenReports()
                    self.world.record_left(worker, message)
                case _:
                    raise TrainingFailed(f"received a malformed message from {worker.name}: {message!r:.200}")
        if 0 in worker.ranks:
            self._returned_before = set(self.world.returned)

    def _name_imports(self, seconds: Mapping[str, float]) -> None:
        if seconds and not self._has_named_imports:
            self._has_named_imports = True
            if not queries.is_first(f"imports of {self._experiment_name}"):
                return
            each = ", ".join(f"{name} ({took:g} s)" for name, took in seconds.items())
            logger.warning("each trial imports %s: preload=%s", each, list(seconds))

    def take_logs(self) -> list[LogChunk]:
        """Return what ranks have printed since the last call."""
        logs, self._logs = self._logs, []
        return [chunk for chunk in logs if chunk.text]

    def _failed(self) -> TrainingFailed:
        """Find the cause, and collect the other ranks' output before they are ended.

        A rank that has lost contact with the others is a symptom, not the cause. Every worker that still
        runs must reply within `prompt_s`; if no other cause is known, one that does not is the cause.
        """
        self.world.end_trial()
        found = self.world.failures  # which grows while the group listens
        began, asked, prompt_s = time.monotonic(), len(self._logs), self.world.limits.prompt_s
        for worker in self.world.members:
            worker.request_reply()
        while True:
            self._listen(0.1)
            waited_s = time.monotonic() - began
            stacks = {chunk.rank: chunk.stack for chunk in self._logs[asked:]}
            missing = [
                each for each in self.world.members if each.running and stacks.keys().isdisjoint(each.ranks)
            ]
            is_known = not failures.needs_cause(found) or waited_s >= ROOT_CAUSE_WAIT_S
            if (is_known and not missing) or waited_s >= prompt_s:
                break
        early = self.world.returned & self.world.hosts.keys() if failures.needs_cause(found) else set()
        # The world ends with the process of a rank that has returned.
        hosts, waiting = self.world.hosts, list(found)
        found += [failures.returned_early(rank, hosts[rank], "a collective", waiting) for rank in early]
        if any(each.kind is FailureKind.STALLED for each in found):
            ahead = self._uneven.failure(self.world.reports, self.world.hosts)
            found += [ahead] if ahead is not None else []
        if failures.needs_cause(found):
            for worker in missing:
                self.world.lose(worker, FailureKind.UNRESPONSIVE, f"no reply for {prompt_s:g} s")
        found = failures.add_awaited_ranks(
            found,
            self._awaited,
            self.world.hosts,
            running=self.world.running,
            returned=self.world.returned,
            stacks=stacks,
        )
        error = TrainingFailed(failures.explain(found, world_size=self.world.size))
        error.lost_nodes = tuple(self.world.lost_nodes)
        return error

    def end_trial(self) -> bool:
        """End the trial on every rank, and its processes; return True if the workers can run another one."""
        if self.world.failures:
            return False
        self.unwind()
        has_changed = bool(self.world.changes or self.world.slots.starting)
        return self._end_ranks() and not has_changed

    def unwind(self) -> None:
        """Stop the training function on every rank that still runs it."""
        self.world.end_trial()
        if not self.world.running:
            return
        for worker in self.world.members:
            worker.actor.stop_training.remote()
        start = time.monotonic()
        is_closing = False
        while self.world.running and time.monotonic() - start < UNWIND_TIMEOUT_S:
            self._listen(0.2)
            if self.world.running and not is_closing and time.monotonic() - start > 0.3:
                # If the function reports on rank 0 only, rank 0 has left at its report, and the others wait
                # for it in a collective. Breaking the world ends their wait.
                is_closing = True
                for worker in self.world.members:
                    worker.actor.close_world.remote()
        self.world.failures = []  # breaking the world makes functions fail

    def begin_end(self) -> None:
        """Let the ranks' processes end, while Tune handles the finished trial."""
        for worker in self.world.members:
            timeout_s = 0.0 if worker.running else EXIT_TIMEOUT_S
            self._ending[worker] = worker.actor.end_trial.remote(timeout_s)

    def _end_ranks(self) -> bool:
        """Wait until the ranks' processes have ended; return False if a worker does not reply."""
        if not self._ending:
            self.begin_end()
        ending, self._ending = self._ending, {}
        for worker in ending:
            if worker.running:
                ranks = ", ".join(map(str, sorted(worker.running)))
                logger.warning(
                    "rank(s) %s did not leave the training function within %g s, and were killed",
                    *(ranks, UNWIND_TIMEOUT_S),
                )
            worker.running.clear()
        replies = replies_to(list(ending.values()), EXIT_TIMEOUT_S + UNWIND_TIMEOUT_S)
        for reply in replies:
            if not isinstance(reply, RayError):
                chunks, warning = reply
                self._logs += chunks
                if warning:
                    logger.warning(warning)
        return not any(isinstance(reply, RayError) for reply in replies)

    def close(self) -> None:
        """End every worker's process and wait for it; may be called twice."""
        unresponsive = {each.rank for each in self.world.failures if each.kind is FailureKind.UNRESPONSIVE}
        # So that functions leave their `finally` blocks and processes run their `atexit` handlers.
        ends = [
            worker.actor.end_process.remote(CLOSE_TIMEOUT_S)
            for worker in self.world.members
            if worker.ranks and unresponsive.isdisjoint(worker.ranks)
        ]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=2 * CLOSE_TIMEOUT_S)
        self._ending = {}
        self.world.close()
