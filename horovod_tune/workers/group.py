"""The ranks of one trial as the coordinator sees them: started, listened to, let go, ended.

Runs in the coordinator, in one thread. Every wait has an end: a member answers `poll` in time even when it
has nothing to say, and one that does not for ``timeout_s`` is lost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from horovod_tune.errors import TrainingFailed
from horovod_tune.messages import (
    CheckpointPlace,
    Failed,
    FailureKind,
    Finished,
    LogChunk,
    Report,
    Stopped,
    Tidied,
    TrialOrder,
)
from horovod_tune.workers import failures
from horovod_tune.workers.gate import NotOurPacket
from horovod_tune.workers.mailbox import Mail, Mailbox
from horovod_tune.workers.members import Members
from horovod_tune.workers.polls import Polls
from horovod_tune.workers.protocol import Launcher

CAUSE_S = 2.0
"""How long a broken collective is looked at for the rank that broke it."""
PING_S = 1.5
"""How long a rank may take to answer when others have lost contact with it."""
CLOSE_S = 2.0
"""How long ranks that go may take to part from each other."""
UNWIND_S = 5.0
"""How long a stopped training function may take to unwind before its process is replaced."""


class WorkerGroup:
    """The members of one world, kept over the trials that they run."""

    def __init__(self, launcher: Launcher, *, timeout_s: float) -> None:
        self.members = Members(launcher, timeout_s=timeout_s)
        self._timeout_s = timeout_s
        self._mailbox = Mailbox()
        self._polls = Polls(self.members, self._mailbox, timeout_s=timeout_s)
        self._run = 0
        self._to_proceed: tuple[int, CheckpointPlace | None] | None = None
        self._newest: CheckpointPlace | None = None
        self._running: set[int] = set()
        self._failures: list[Failed] = []
        self._lost_nodes: list[str] = []
        self._reports: list[Report] = []
        self._logs: list[LogChunk] = []
        self._tidying: list[Any] = []

    @property
    def hosts(self) -> list[str]:
        """The host of each rank, by rank."""
        return self.members.hosts

    def create(self) -> None:
        """Begin to start the members; does not wait for them."""
        self.members.create()

    def begin(self, order: TrialOrder) -> None:
        """Start a trial on all ranks, as soon as they are there.

        Raises:
            StartFailed: members did not come up within ``timeout_s``, or landed wrongly.
        """
        if not self.members.actors:
            self.create()
        if not self.members.are_assembled:
            self.members.assemble()
            self._mailbox.open_gates(self.members.gates.values())
        self._failures, self._reports, self._logs, self._lost_nodes = [], [], [], []
        self._to_proceed, self._newest = None, None
        self._running = self.members.all_ranks
        self._run += 1
        order = replace(order, run=self._run)
        self.members.get_all(
            [member.begin.remote(order) for member in self.members.actors], "to begin the trial"
        )
        self._polls.forget()
        for member in range(len(self.members)):
            self._polls.ask(member)

    def next_event(self) -> Report | Finished:
        """Wait for rank 0's next report, or for the end of the training function on every rank.

        Raises:
            TrainingFailed: a rank raised, died, fell silent or lost the others.
        """
        self._let_go()
        entered = time.monotonic()
        while True:
            if self._reports:
                return self._reports.pop(0)
            if self._failures:
                raise self._failed(self._failures)
            if not self._running:
                return Finished(0)
            self._listen(self._polls.every_s)
            for member in self._polls.give_up_silent(entered):
                self._lose(
                    member,
                    FailureKind.SILENT,
                    f"gave no sign of life for timeout_s={self._timeout_s:g} s",
                )

    def take_logs(self) -> list[LogChunk]:
        """Return what ranks have printed since the last call."""
        logs, self._logs = self._logs, []
        return logs

    def proceed(self, index: int, checkpoint: CheckpointPlace | None) -> None:
        """Let every rank go on after report ``index`` when `next_event` is called again."""
        self._to_proceed = (index, replace(checkpoint, report=index) if checkpoint else None)

    def _let_go(self) -> None:
        if self._to_proceed is None:
            return
        index, checkpoint = self._to_proceed
        # The newest goes with every call, since a call may overtake the one that brought it first.
        self._newest = checkpoint or self._newest
        self._to_proceed = None
        polled = self._polls.asked
        for i, member in enumerate(self.members.actors):
            gate = self.members.gates.get(i)
            released = gate is not None and gate.release(self._run, index, self._newest)
            if i in polled:
                if not released:
                    member.proceed.remote(index, self._newest)
            elif self._running & set(self.members.ranks[i]):
                # One call for both is the way of rank 0's member where it has no gate.
                self._polls.ask(i, *(() if released else (index, self._newest)))

    def _listen(self, wait_s: float) -> None:
        """Take in what members say within ``wait_s``, and ask them again."""
        mail = self._open_mail(wait_s)
        # A report that came through a gate was sent before the answer that came with it.
        self._reports += [report for run, report in mail.reports if run == self._run]
        for number, answer in mail.answers:
            member = self._polls.answered(number)
            if member is None:
                continue  # of a member that is given up
            try:
                messages = answer.result()
            except RayActorError as error:
                self._lose(member, FailureKind.DIED, failures.death_text(error))
                continue
            self._take(messages)
            waits_for_us = any(isinstance(message, Report) for message in messages)
            if not waits_for_us and self._running & set(self.members.ranks[member]):
                self._polls.ask(member)

    def _open_mail(self, wait_s: float) -> Mail:
        try:
            return self._mailbox.wait(wait_s)
        except NotOurPacket as error:
            raise TrainingFailed(f"something that is no rank of ours speaks: {error}") from error

    def _take(self, messages: Sequence[Any]) -> None:
        for message in messages:
            match message:
                case Report():
                    self._reports.append(message)
                case Finished(rank=rank) | Stopped(rank=rank):
                    self._running.discard(rank)
                    if rank == 0:
                        self._release_reports()
                case Failed(rank=rank):
                    self._running.discard(rank)
                    self._failures.append(message)
                case LogChunk():
                    self._logs.append(message)
                case _:
                    raise TrainingFailed(f"a member sent {message!r}, which is no message of ours")

    def _release_reports(self) -> None:
        """Rank 0 has returned: ranks that report more often than it have nobody to wait for."""
        for member in self.members.actors:
            member.proceed.remote(math.inf, self._newest)

    def _lose(self, member: int, kind: FailureKind, text: str) -> None:
        fact = self.members.facts[member]
        self._lost_nodes.append(fact.node_id)
        for rank in self.members.ranks[member]:
            self._running.discard(rank)
            self._failures.append(Failed(rank, fact.host, kind, f"process {fact.pid}: {text}"))

    def _failed(self, first: list[Failed]) -> TrainingFailed:
        """Find the cause: a rank that lost the others tells that something happened, not what."""
        end = time.monotonic() + CAUSE_S
        while failures.needs_cause(first) and self._running and time.monotonic() < end:
            self._listen(max(0.05, min(0.5, end - time.monotonic())))
        if failures.needs_cause(first):
            self._ping_the_others()
        if self._polls.asked:
            self._listen(0)  # for what the ranks have printed
        error = TrainingFailed(failures.explain(first, world_size=len(self.members.all_ranks)))
        error.lost_nodes = tuple(self._lost_nodes)
        return error

    def _ping_the_others(self) -> None:
        silent = [i for i in range(len(self.members)) if self._running & set(self.members.ranks[i])]
        refs = {self.members.actors[i].ping.remote(): i for i in silent}
        if not refs:
            return
        ready, waiting = ray.wait(list(refs), num_returns=len(refs), timeout=PING_S)
        for ref in waiting:
            self._lose(refs[ref], FailureKind.SILENT, f"does not answer (asked for {PING_S:g} s)")
        for ref in ready:
            try:
                ray.get(ref)
            except RayError as error:
                self._lose(refs[ref], FailureKind.DIED, failures.death_text(error))

    def end_trial(self) -> list[str]:
        """End the trial on every rank and make the members fit for the next one.

        Returns:
            why they are not, empty when they are: then they hold a sound world and clean processes.
        """
        if not self.members.are_assembled:
            return ["there are no ranks"]
        if self._failures:
            return ["a rank failed"]
        problems = self.unwind()
        return problems or self._tidy()

    def unwind(self) -> list[str]:
        """Stop the training function on every rank that still runs it; return why that was not possible."""
        if not self._running:
            return []
        for member in self.members.actors:
            member.stop_training.remote()
        polled = self._polls.asked
        for i in range(len(self.members)):
            if i not in polled and self._running & set(self.members.ranks[i]):
                self._polls.ask(i)
        start = time.monotonic()
        closing: list[Any] = []
        while self._running and time.monotonic() - start < UNWIND_S:
            self._listen(0.2)
            if self._running and not closing and time.monotonic() - start > 0.3:
                # Some ranks left at their report, others wait in a collective for them (the function
                # reports on rank 0 only): breaking the world gets those out as well.
                closing = [member.close_world.remote() for member in self.members.actors]
        if self._running:
            return [f"rank(s) {sorted(self._running)} did not leave the training function in {UNWIND_S:g} s"]
        self._failures = []  # ranks that were thrown out of a collective end with an error
        try:
            # A world that is closed on one rank later than on another could be taken for sound in between.
            ray.get(closing, timeout=UNWIND_S)
        except RayError as error:
            return [f"the world could not be closed: {error}"]
        return []

    def begin_to_tidy(self) -> None:
        """Begin to make the members fit for the next trial, while Tune deals with the finished one."""
        self._tidying = [member.tidy.remote(1.0) for member in self.members.actors]

    def _tidy(self) -> list[str]:
        if not self._tidying:
            self.begin_to_tidy()
        tidying, self._tidying = self._tidying, []
        try:
            tidied: list[Tidied] = ray.get(tidying, timeout=UNWIND_S + 5)
        except RayError as error:
            return [f"a rank could not be tidied: {error}"]
        return [problem for each in tidied for problem in each.problems]

    def close(self) -> None:
        """End every member's process, and see it gone; twice is harmless."""
        if self.members.are_assembled and not self._running and not self._failures:
            # Without this, the ranks that are killed last complain about those that went first.
            worlds = [member.close_world.remote() for member in self.members.actors]
            ray.wait(worlds, num_returns=len(worlds), timeout=CLOSE_S)
        self._running, self._tidying = set(), []
        self._polls.forget()
        self._mailbox.close_gates()
        self.members.end(lost_nodes=self._lost_nodes)
