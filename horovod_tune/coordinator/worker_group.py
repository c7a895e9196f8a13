"""The coordinator's side of a trial: handles its workers' reports, logs and failures, and ends it.

Runs in one thread. Every wait has an end: a worker replies to `poll` even if it has nothing to send; one that
has not replied for the trial's ``timeout_s`` is lost, which `world` handles.

Step 3 of 5 of a report's path: `next_event()` returns it to `coordinator.py`, and the next call
acknowledges it on every rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from horovod_tune.coordinator import failures
from horovod_tune.coordinator.backend_protocol import Launcher
from horovod_tune.coordinator.policy import Limits
from horovod_tune.coordinator.workers import EventQueue, Worker, last_output
from horovod_tune.coordinator.world import World
from horovod_tune.errors import TrainingFailed, death_text
from horovod_tune.messages import (
    AwaitedRanks,
    CheckpointPlace,
    Failed,
    FailureKind,
    Finished,
    LogChunk,
    NeedsWorld,
    Report,
    TrialRequest,
)

# How long to wait for the cause if it is only known that ranks have lost contact with each other.
ROOT_CAUSE_WAIT_S = 2.0
# How long a stopped training function, with its `atexit` handlers, may take to end before its process is
# replaced.
UNWIND_TIMEOUT_S = 5.0
# How long processes may take to close their world before they are killed.
CLOSE_TIMEOUT_S = 2.0


class WorkerGroup:
    """The workers, which run one trial after another."""

    def __init__(self, launcher: Launcher, limits: Limits) -> None:
        self._events = EventQueue()
        self.world = World(launcher, limits, self._events)
        # The calls of `begin_reset`.
        self._resetting: list[Any] = []
        self._run = 0
        self._forget_trial()

    def _forget_trial(self) -> None:
        self.world.forget_trial()
        self._logs: list[LogChunk] = []
        # The ranks that had returned by the previous poll of rank 0.
        self._returned_before: set[int] = set()
        # The `names` of the last `AwaitedRanks` message.
        self._awaited: dict[int, str] = {}

    def begin(self, request: TrialRequest) -> None:
        """Start a trial on all ranks, once the workers have started; raises StartFailed as `World.form`."""
        if not self.world.members:
            self.world.create()
        if not self.world.hosts:
            self.world.form()
        self._forget_trial()
        self._run += 1
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
            self._listen(self.world.tick_s)
            self.world.advance(entered)
            keep_logs()

    def _acknowledge(self, index: int, checkpoint: CheckpointPlace | None) -> None:
        if checkpoint is not None:
            self.world.checkpoint = replace(checkpoint, report=index)
        # The newest checkpoint is part of every acknowledgement, since Ray's calls may arrive out of order.
        newest = self.world.checkpoint
        for worker in self.world.members:
            channel = worker.channel
            if channel is None or not channel.acknowledge(self._run, index, newest):
                worker.actor.acknowledge.remote(index, newest)

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
                self.world.lose(worker, FailureKind.DIED, self._death_of(worker, error))
                continue
            self._take(worker, messages)
        self.world.poll_all()

    def _death_of(self, worker: Worker, error: RayError) -> str:
        """Return how a worker's process ended, and its last lines: a crash prints its stack."""
        # An elastic trial should continue at once.
        text = last_output(worker, of_other_hosts=not self.world.limits.is_elastic)
        self._logs += [LogChunk(rank, text) for rank in worker.ranks]
        return failures.last_lines(text) + death_text(error)

    def _take(self, worker: Worker, messages: Sequence[Any]) -> None:
        for message in messages:
            match message:
                case Report():
                    self.world.record_report(message)
                case Finished(rank=rank):
                    worker.running.discard(rank)
                    self.world.returned.add(rank)
                    if rank == 0:  # the other ranks must not wait for it in further reports
                        for each in self.world.members:
                            each.actor.acknowledge.remote(math.inf, self.world.checkpoint)
                case Failed(rank=rank):
                    worker.running.discard(rank)
                    self.world.failures.append(message)
                case LogChunk():
                    self._logs.append(message)
                    worker.offsets = message.offsets
                case AwaitedRanks(names=names):
                    self._awaited, hosts = names, self.world.hosts
                    # The stall inspector does not say whether a missing rank has returned. Its message may be
                    # as old as the previous poll, so only ranks that had returned then count.
                    for rank in self._returned_before & names.keys() & hosts.keys():
                        if self.world.running:
                            early = failures.returned_early(rank, hosts[rank], names[rank])
                            self.world.failures.append(early)
                case NeedsWorld() if self.world.limits.is_elastic:
                    self.world.record_left(worker, message)
                case _:
                    raise TrainingFailed(f"received a malformed message from {worker.name}: {message!r:.200}")
        if 0 in worker.ranks:
            self._returned_before = set(self.world.returned)

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

    def end_trial(self) -> list[str]:
        """End the trial on every rank; reset the workers, or return why they cannot run another one."""
        if self.world.failures:
            return ["a rank failed"]
        problems = self.unwind() or self._reset()
        if not problems and (self.world.changes or self.world.slots.starting):
            return ["the trial's world changed, or workers were still joining it"]
        return problems

    def unwind(self) -> list[str]:
        """Stop the training function on every rank that still runs it; return why that failed."""
        self.world.end_trial()
        if not self.world.running:
            return []
        for worker in self.world.members:
            worker.actor.stop_training.remote()
        start = time.monotonic()
        closing: list[Any] = []
        while self.world.running and time.monotonic() - start < UNWIND_TIMEOUT_S:
            self._listen(0.2)
            if self.world.running and not closing and time.monotonic() - start > 0.3:
                # If the function reports on rank 0 only, rank 0 has left at its report, and the others wait
                # for it in a collective. Breaking the world ends their wait.
                closing = [worker.actor.close_world.remote() for worker in self.world.members]
        running = sorted(self.world.running)
        if running:
            return [f"rank(s) {running} did not leave the training function in {UNWIND_TIMEOUT_S:g} s"]
        self.world.failures = []  # breaking the world makes functions fail
        try:
            # A rank that has not closed the world yet would treat it as usable.
            ray.get(closing, timeout=UNWIND_TIMEOUT_S)
        except RayError as error:
            return [f"the world could not be closed: {error}"]
        return []

    def begin_reset(self) -> None:
        """Begin to reset the workers, while Tune handles the finished trial."""
        self._resetting = [worker.actor.reset.remote(1.0) for worker in self.world.members]

    def _reset(self) -> list[str]:
        if not self._resetting:
            self.begin_reset()
        resets, self._resetting = self._resetting, []
        try:
            found: list[list[str]] = ray.get(resets, timeout=UNWIND_TIMEOUT_S + 5)
        except RayError as error:
            return [f"a rank could not be reset: {error}"]
        return [problem for problems in found for problem in problems]

    def close(self) -> None:
        """End every worker's process and wait for it; may be called twice."""
        unresponsive = {each.rank for each in self.world.failures if each.kind is FailureKind.UNRESPONSIVE}
        # So that the processes run their `atexit` handlers, and log no lost connections while others are
        # killed.
        ends = [
            worker.actor.end_process.remote()
            for worker in self.world.members
            if worker.ranks and unresponsive.isdisjoint(worker.ranks)
        ]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=CLOSE_TIMEOUT_S)
        self._resetting = []
        self.world.close()
