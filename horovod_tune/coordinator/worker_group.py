"""The workers of one trial as the coordinator sees them: started, polled, released from reports, ended.

Runs in the coordinator, in one thread. Every wait has an end: a worker answers `poll` in time even when it
has nothing to say, and one that does not for ``timeout_s`` is lost.

Third on the way of a report: `next_event()` returns it to `coordinator.py` (4), and the next call releases
every rank from it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from horovod_tune import error_text
from horovod_tune.channel.packing import MalformedMessage
from horovod_tune.coordinator import actor_processes, failures
from horovod_tune.coordinator.backend_protocol import Launcher
from horovod_tune.coordinator.early_returns import EarlyReturns
from horovod_tune.coordinator.first_world import form_world
from horovod_tune.coordinator.inbox import Inbox, Mail
from horovod_tune.coordinator.releases import Releases
from horovod_tune.coordinator.worker import Worker, call_all, ping_all
from horovod_tune.errors import TrainingFailed
from horovod_tune.messages import (
    CheckpointPlace,
    Failed,
    FailureKind,
    Finished,
    LogChunk,
    Report,
    ResetResult,
    Stopped,
    TrialRequest,
)

# The longest time between two signs of life of a worker (a quarter of timeout_s where that is shorter).
POLL_S = 10.0

# From how many bytes on an order goes to each host once, through Ray's object store, not to each worker.
SHARED_ORDER_BYTES = 1_000_000
# How long a broken collective is looked at for the rank that broke it.
CAUSE_S = 2.0
# How long a rank may take to answer when others have lost contact with it.
PING_S = 1.5
# How long the other ranks' last output is waited for when one has failed.
LAST_LOGS_S = 5.0
# How long ranks that go may take to part from each other.
CLOSE_S = 2.0
# How long a stopped training function may take to unwind before its process is replaced.
UNWIND_S = 5.0


class WorkerGroup:
    """The workers of one world, kept over the trials that they run; all that is known of them is here.

    Args:
        launcher: starts the actors and tells each its ranks.
        timeout_s: seconds of silence after which a worker is lost. It bounds each phase of the start too.
    """

    def __init__(self, launcher: Launcher, *, timeout_s: float) -> None:
        # In the order of the launcher's placement; empty until `create`.
        self.workers: list[Worker] = []
        self._launcher = launcher
        self._timeout_s = timeout_s
        self._poll_s = min(POLL_S, timeout_s / 4)
        self._inbox = Inbox()
        self._resetting: list[Any] = []
        self._world_size = 0
        self._run = 0
        self._forget_trial()

    def _forget_trial(self) -> None:
        self._releases = Releases()
        self._early_returns = EarlyReturns()
        self._reports: list[Report] = []
        self._last_report = 0
        self._logs: list[LogChunk] = []
        self._failures: list[Failed] = []
        self._lost_nodes: list[str] = []

    @property
    def hosts(self) -> list[str]:
        """The host of each rank, by rank; empty until the workers have their ranks."""
        by_rank = {
            rank: worker.facts.host for worker in self.workers if worker.facts for rank in worker.ranks
        }
        return [by_rank[rank] for rank in sorted(by_rank)]

    @property
    def _have_ranks(self) -> bool:
        return any(worker.ranks for worker in self.workers)

    @property
    def _running(self) -> set[int]:
        """The ranks whose training function runs."""
        return {rank for worker in self.workers for rank in worker.running}

    def create(self) -> None:
        """Begin to start the workers, in the trial's start slot; does not wait for them."""
        self.workers = [Worker(actor, place) for place, actor in enumerate(self._launcher.create())]

    def begin(self, order: TrialRequest) -> None:
        """Start a trial on all ranks, as soon as they are there.

        Raises:
            StartFailed: workers did not start within ``timeout_s``, or were placed wrongly.
        """
        if not self.workers:
            self.create()
        if not self._have_ranks:
            self._form_world()
        self._forget_trial()
        self._run += 1
        self._start_training(replace(order, run=self._run))

    def _form_world(self) -> None:
        form_world(self.workers, self._launcher, self._inbox, timeout_s=self._timeout_s)
        self._world_size = len(self.hosts)

    def _start_training(self, order: TrialRequest) -> None:
        shared = self._share(order)
        begun = [worker.actor.begin.remote(shared) for worker in self.workers]
        call_all(self.workers, begun, "to begin the trial", timeout_s=self._timeout_s)
        for worker in self.workers:
            worker.running = set(worker.ranks)
            self._ask(worker)

    def _share(self, order: TrialRequest) -> Any:
        """Return what `begin` is called with; of a large order a reference, or each call would copy it."""
        size = len(order.function) if order.function is not None else 0
        return ray.put(order) if size * len(self.workers) >= SHARED_ORDER_BYTES else order

    def _ask(self, worker: Worker, *proceed: Any) -> None:
        worker.ask(self._inbox, self._poll_s, *proceed)

    def next_event(self) -> Report | Finished:
        """Wait for rank 0's next report, or for the end of the training function on every rank.

        Raises:
            TrainingFailed: a rank raised, died, fell silent or lost the others.
        """
        self._releases.send(self.workers, self._run, self._ask)
        entered = time.monotonic()
        while True:
            if self._reports:
                return self._reports.pop(0)
            if self._failures:
                raise self._failed(self._failures)
            if not self._running:
                return Finished(0)
            self._listen(self._listen_s)
            self._tend(entered)

    @property
    def _listen_s(self) -> float:
        """How long to listen before `_tend` looks at the workers again."""
        return self._poll_s

    def _tend(self, since: float) -> None:
        """Give up workers that owe a sign of life; ``since`` is when somebody began to listen."""
        for worker in list(self.workers):
            if worker.silent_s(self._poll_s, since) > self._timeout_s:
                worker.forget_question()
                text = f"gave no sign of life for timeout_s={self._timeout_s:g} s"
                self._lose(worker, FailureKind.SILENT, text)
        self._look_for_early_returns()

    def _look_for_early_returns(self) -> None:
        """Fail where ranks wait in a collective for one that has returned and so never enters it."""
        running = self._running
        hosts = {rank: worker.facts.host for worker in self.workers if worker.facts for rank in worker.ranks}
        first = next((worker for worker in self.workers if 0 in worker.ranks), None)
        if first is None or self._failures or not running:
            return
        for rank, names in self._early_returns.look(first, hosts.keys() - running).items():
            text = f"the others wait for rank {rank} in {names}: every rank has to call the same collectives"
            self._failures.append(Failed(rank, hosts[rank], FailureKind.RETURNED, text))

    def take_logs(self) -> list[LogChunk]:
        """Return what ranks have printed since the last call."""
        logs, self._logs = self._logs, []
        return [chunk for chunk in logs if chunk.text]

    def proceed(self, index: int, checkpoint: CheckpointPlace | None) -> None:
        """Let every rank go on after report ``index`` when `next_event` is called again."""
        self._releases.note(index, checkpoint)

    @property
    def _newest(self) -> CheckpointPlace | None:
        return self._releases.newest

    def _listen(self, wait_s: float) -> None:
        """Take in what workers say within ``wait_s``, and ask them again."""
        mail = self._open_mail(wait_s)
        # A report that came through a channel was sent before the answer that came with it.
        for run, report in mail.reports:
            if run == self._run:
                self._note_report(report)
        for number, answer in mail.answers:
            worker = next((each for each in self.workers if each.has_answered(number)), None)
            if worker is None:
                continue  # of a worker that is given up
            try:
                messages = answer.result()
            except (RayActorError, OutOfMemoryError) as error:
                self._lose(worker, FailureKind.DIED, error_text.death_text(error))
                continue
            last_report = self._last_report
            self._take(worker, messages)
            waits_for_us = self._last_report > last_report
            if not waits_for_us and worker.running and not worker.is_asked:
                self._ask(worker, *self._releases.lost_to(worker))

    def _open_mail(self, wait_s: float) -> Mail:
        try:
            return self._inbox.wait(wait_s)
        except MalformedMessage as error:
            raise TrainingFailed(f"received a malformed message on a rank's socket: {error}") from error

    def _take(self, worker: Worker, messages: Sequence[Any]) -> None:
        for message in messages:
            match message:
                case Report():
                    self._note_report(message)
                case Finished(rank=rank) | Stopped(rank=rank):
                    worker.running.discard(rank)
                    self._note_ended()
                    if rank == 0:
                        self._releases.send_last(self.workers)
                case Failed(rank=rank):
                    worker.running.discard(rank)
                    self._failures.append(message)
                case LogChunk():
                    self._logs.append(message)
                case _:
                    self._take_other(worker, message)

    def _note_report(self, report: Report) -> None:
        # A rank that has lost its channel sends its report again: we may have got it, and let it go in vain.
        if report.index > self._last_report:
            self._last_report = report.index
            self._reports.append(report)

    def _note_ended(self) -> None:
        """A rank's training function has returned, or was unwound."""

    @property
    def change_facts(self) -> dict[str, Any]:
        """What a result of an elastic trial says of the changes of its world."""
        return {}

    def may_end_soon(self, node_id: str) -> bool:
        """Whether an elastic trial will have to start again; ``node_id`` is the coordinator's."""
        return False

    def dump_commit(self) -> bytes | None:
        """Return what the ranks have committed last, as bytes; None where they have committed nothing."""
        for worker in self.workers:
            try:
                dumped: bytes | None = ray.get(worker.actor.dump_commit.remote(), timeout=self._timeout_s)
            except RayError:
                continue  # it is noted as lost when it is listened to
            return dumped
        return None

    def resize(self, workers: int, resources: bytes) -> bool:
        """Let an elastic trial have as many ranks from its next commit on; whether that is possible.

        ``resources`` is what its function sees then, as in `TrialRequest`.
        """
        return False

    def _take_other(self, worker: Worker, message: Any) -> None:
        raise TrainingFailed(f"received a malformed message from {worker.name}: {message!r:.200}")

    def _lose(self, worker: Worker, kind: FailureKind, text: str) -> None:
        fact = worker.facts
        assert fact is not None, "a worker without ranks is not polled"
        self._lost_nodes.append(fact.node_id)
        worker.running.clear()
        self._failures += [
            Failed(rank, fact.host, kind, f"process {fact.pid}: {text}") for rank in worker.ranks
        ]

    def _failed(self, first: list[Failed]) -> TrainingFailed:
        """Find the cause: a rank that lost the others tells that something happened, not what."""
        end = time.monotonic() + CAUSE_S
        while failures.needs_cause(first) and self._running and time.monotonic() < end:
            self._listen(max(0.05, min(0.5, end - time.monotonic())))
        if failures.needs_cause(first):
            self._lose_the_silent([each for each in self.workers if each.running], timeout_s=PING_S)
        self._hear_last_logs()
        error = TrainingFailed(failures.explain(first, world_size=self._world_size))
        error.lost_nodes = tuple(self._lost_nodes)
        return error

    def _hear_last_logs(self) -> None:
        """Take in what the other ranks have printed: they are about to be ended."""
        waiting = [worker for worker in self.workers if worker.running]
        for worker in waiting:
            worker.actor.send_logs.remote()
            if not worker.is_asked:
                self._ask(worker)
        heard, end = len(self._logs), time.monotonic() + LAST_LOGS_S
        self._listen(0)
        while time.monotonic() < end:
            told = {chunk.rank for chunk in self._logs[heard:]}
            if all(not worker.running or told & set(worker.ranks) for worker in waiting):
                return
            self._listen(0.1)

    def _lose_the_silent(self, workers: Sequence[Worker], *, timeout_s: float) -> None:
        """Ask workers for a sign of life, and give up those that have none in ``timeout_s`` or are dead."""
        silent, dead = ping_all(workers, timeout_s=timeout_s)
        for worker in silent:
            self._lose(worker, FailureKind.SILENT, f"does not answer (asked for {timeout_s:g} s)")
        for worker, error in dead:
            self._lose(worker, FailureKind.DIED, error_text.death_text(error))

    def end_trial(self) -> list[str]:
        """End the trial on every rank and make the workers fit for the next one.

        Returns:
            why they are not, empty when they are: then they hold a sound world and clean processes.
        """
        if not self._have_ranks:
            return ["there are no ranks"]
        if self._failures:
            return ["a rank failed"]
        problems = self.unwind()
        return problems or self._reset()

    def unwind(self) -> list[str]:
        """Stop the training function on every rank that still runs it; return why that was not possible."""
        if not self._running:
            return []
        for worker in self.workers:
            worker.actor.stop_training.remote()
            if worker.running and not worker.is_asked:
                self._ask(worker)
        start = time.monotonic()
        closing: list[Any] = []
        while self._running and time.monotonic() - start < UNWIND_S:
            self._listen(0.2)
            if self._running and not closing and time.monotonic() - start > 0.3:
                # Some ranks left at their report, others wait in a collective for them (the function
                # reports on rank 0 only): breaking the world gets those out as well.
                closing = [worker.actor.close_world.remote() for worker in self.workers]
        if self._running:
            return [f"rank(s) {sorted(self._running)} did not leave the training function in {UNWIND_S:g} s"]
        self._failures = []  # ranks that were thrown out of a collective end with an error
        try:
            # A world that is closed on one rank later than on another could be taken for sound in between.
            ray.get(closing, timeout=UNWIND_S)
        except RayError as error:
            return [f"the world could not be closed: {error}"]
        return []

    def begin_reset(self) -> None:
        """Begin to make the workers fit for the next trial, while Tune deals with the finished one."""
        self._resetting = [worker.actor.reset.remote(1.0) for worker in self.workers]

    def _reset(self) -> list[str]:
        if not self._resetting:
            self.begin_reset()
        resets, self._resetting = self._resetting, []
        try:
            results: list[ResetResult] = ray.get(resets, timeout=UNWIND_S + 5)
        except RayError as error:
            return [f"a rank could not be reset: {error}"]
        return [problem for each in results for problem in each.problems]

    def close(self) -> None:
        """End every worker's process, and see it gone; twice is harmless."""
        if self._have_ranks:
            # Without this, the ranks that are killed last complain about those that went first, and what
            # functions have left to `atexit` never runs.
            silent = {each.rank for each in self._failures if each.kind is FailureKind.SILENT}
            there = [worker for worker in self.workers if silent.isdisjoint(worker.ranks)]
            ends = [worker.actor.end_process.remote() for worker in there]
            ray.wait(ends, num_returns=len(ends), timeout=CLOSE_S)
        workers, self.workers, self._resetting = self.workers, [], []
        self._inbox.close_channels()
        actor_processes.end_actors(
            [worker.actor for worker in workers],
            [*(worker.facts for worker in workers if worker.facts), *self._launcher.processes_below()],
            lost_nodes=self._lost_nodes,
        )
        self._launcher.close()
