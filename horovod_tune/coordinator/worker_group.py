"""The coordinator's side of a trial: handles its workers' reports, logs and failures, and ends it.

Runs in one thread. Every wait has an end: a worker replies to `poll` even if it has nothing to send; one that
has not replied for the trial's ``timeout_s`` is lost, which `world` handles.

Step 3 of 5 of a report's path: `next_event()` returns it to `coordinator.py`, and the next call
acknowledges it on every rank.
"""

from __future__ import annotations

import logging
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
from horovod_tune.coordinator.trial_state import TrialState
from horovod_tune.coordinator.uneven_reports import STACK_INTERVAL_S
from horovod_tune.coordinator.workers import EventQueue, Worker, replies_to
from horovod_tune.coordinator.world import World
from horovod_tune.errors import MetricsError, TrainingFailed, death_text
from horovod_tune.messages import (
    CheckpointPlace,
    FailureKind,
    Finished,
    ImportsSeen,
    LogChunk,
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

    @property
    def state(self) -> TrialState[Worker]:
        return self.world.state

    def begin(self, request: TrialRequest) -> None:
        """Start a trial on all ranks, once the workers have started; raises StartFailed as `World.form`."""
        if not self.state.members:
            self.world.create()
        self.world.forget_trial()
        self.world.form()
        self._run += 1
        self._experiment_name = request.experiment_name
        self.world.begin(replace(request, run=self._run, is_elastic=self.state.limits.is_elastic))

    def next_event(
        self, checkpoint: CheckpointPlace | None = None, keep_logs: Callable[[], None] = lambda: None
    ) -> Report | Finished:
        """Wait for rank 0's next report, or for the end of the training function on every rank.

        The previous report, whose checkpoint is stored at ``checkpoint``, is acknowledged first. While it
        waits, it calls ``keep_logs``: Tune may kill this process before the next report.

        Raises:
            TrainingFailed: a rank raised, died, stopped responding or lost contact with the others.
        """
        if self.state.reports:
            self._acknowledge(self.state.reports, checkpoint)
        entered = time.monotonic()
        while True:
            if report := self.state.take_report(time.monotonic()):
                return report
            if self.state.failures:
                raise self._failed()
            if not self.state.running:
                return Finished(0)
            tick_s = self.world.tick_s
            self._listen(min(tick_s, STACK_INTERVAL_S) if self.state.has_uneven_reports else tick_s)
            self.world.advance(entered)
            keep_logs()

    def _acknowledge(self, index: int, checkpoint: CheckpointPlace | None) -> None:
        if checkpoint is not None:
            self.state.checkpoint = replace(checkpoint, report=index)
        # The newest checkpoint is part of every acknowledgement, since Ray's calls may arrive out of order.
        newest = self.state.checkpoint
        for worker in self.state.members:
            channel = worker.channel
            if channel is None or not channel.acknowledge(self._run, index, newest):
                worker.actor.acknowledge.remote(self._run, index, newest)

    def _listen(self, wait_s: float) -> None:
        """Handle the messages that arrive within ``wait_s``, and poll the workers again."""
        replies, reports = self._events.wait(wait_s)
        # Reports first: they were sent before the replies that were received in the same wait.
        for run, report in reports:
            if run == self._run:
                self.state.record_report(report)
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
        events = list[Any]()
        for message in messages:
            match message:
                case ImportsSeen(seconds=seconds):
                    self._name_imports(seconds)
                case Report(metrics=bytes() as pickled):
                    try:
                        metrics = pickle.loads(pickled)
                    except Exception as error:  # of a class that this process cannot import
                        raise MetricsError(
                            f"the metrics that rank 0 reported cannot be read outside of it: {error}. Report "
                            "numbers, strings, and lists or dicts of them"
                        ) from error
                    events.append(replace(message, metrics=metrics))
                case _:
                    events.append(message)
        self.world.carry_out(self.state.receive(worker, events, time.monotonic()))

    def _name_imports(self, seconds: Mapping[str, float]) -> None:
        if seconds and not self._has_named_imports:
            self._has_named_imports = True
            if not queries.is_first(f"imports of {self._experiment_name}"):
                return
            each = ", ".join(f"{name} ({took:g} s)" for name, took in seconds.items())
            logger.warning("each trial imports %s: preload=%s", each, list(seconds))

    def take_logs(self) -> list[LogChunk]:
        """Return what ranks have printed since the last call."""
        logs, self.state.logs = self.state.logs, []
        return [chunk for chunk in logs if chunk.text]

    def _failed(self) -> TrainingFailed:
        """Find the cause, and collect the other ranks' output before they are ended.

        A rank that has lost contact with the others is a symptom, not the cause. Every worker that still
        runs must reply within `prompt_s`; if no other cause is known, one that does not is the cause.
        """
        state = self.state
        state.end()
        began, asked = time.monotonic(), len(state.logs)
        for worker in state.members:
            worker.request_reply()
        while True:
            self._listen(0.1)
            waited_s = time.monotonic() - began
            stacks = {chunk.rank: chunk.stack for chunk in state.logs[asked:]}
            is_known = not failures.needs_cause(state.failures) or waited_s >= ROOT_CAUSE_WAIT_S
            if (is_known and not state.silent(stacks)) or waited_s >= state.limits.prompt_s:
                return state.error(stacks, time.monotonic())

    def end_trial(self) -> bool:
        """End the trial on every rank, and its processes; return True if the workers can run another one."""
        if self.state.failures:
            return False
        self.unwind()
        has_changed = bool(self.state.changes or self.world.slots.starting)
        return self._end_ranks() and not has_changed

    def unwind(self) -> None:
        """Stop the training function on every rank that still runs it."""
        self.state.end()
        if not self.state.running:
            return
        for worker in self.state.members:
            worker.actor.stop_training.remote()
        start = time.monotonic()
        is_closing = False
        while self.state.running and time.monotonic() - start < UNWIND_TIMEOUT_S:
            self._listen(0.2)
            if self.state.running and not is_closing and time.monotonic() - start > 0.3:
                # If the function reports on rank 0 only, rank 0 has left at its report, and the others wait
                # for it in a collective. Breaking the world ends their wait.
                is_closing = True
                for worker in self.state.members:
                    worker.actor.close_world.remote()
        self.state.failures = []  # breaking the world makes functions fail

    def begin_end(self) -> None:
        """Let the ranks' processes end, while Tune handles the finished trial."""
        for worker in self.state.members:
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
                self.state.logs += chunks
                if warning:
                    logger.warning(warning)
        return not any(isinstance(reply, RayError) for reply in replies)

    def close(self) -> None:
        """End every worker's process and wait for it; may be called twice."""
        unresponsive = {each.rank for each in self.state.failures if each.kind is FailureKind.UNRESPONSIVE}
        # So that functions leave their `finally` blocks and processes run their `atexit` handlers.
        ends = [
            worker.actor.end_process.remote(CLOSE_TIMEOUT_S)
            for worker in self.state.members
            if worker.ranks and unresponsive.isdisjoint(worker.ranks)
        ]
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=2 * CLOSE_TIMEOUT_S)
        self._ending = {}
        self.world.close()
