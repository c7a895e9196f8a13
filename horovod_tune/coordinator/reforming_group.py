"""A worker group whose ranks leave a broken world and form the next one in the same processes.

When a rank is lost, the coordinator breaks the world on the others (`break_world`), so that none waits in a
collective or a report. Each says `NeedsWorld` when its training function has left it. When all have, the next
world is formed: a new rendezvous, a place for each (`rejoin`). When that is, `elastic_group` decides.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import RayError

from horovod_tune.coordinator import actor_processes, failures
from horovod_tune.coordinator.backend_protocol import ElasticLauncher
from horovod_tune.coordinator.first_world import connect
from horovod_tune.coordinator.joining import JoiningWorkers
from horovod_tune.coordinator.signs_of_life import MOST_SILENCE_S, SignsOfLife
from horovod_tune.coordinator.worker import Worker
from horovod_tune.coordinator.worker_group import WorkerGroup
from horovod_tune.error_text import death_text
from horovod_tune.errors import StartFailed
from horovod_tune.messages import Failed, FailureKind, NeedsWorld, Report, TrialRequest, WorkerInfo

# Ranks that have not left a world so soon after the first one are asked for a sign of life, and again so
# long after they have given one.
ASK_AFTER_S = 0.2
ASK_AGAIN_S = 1.5
# After how many worlds in a row in which nothing was reported the trial fails.
WORLDS_WITHOUT_REPORT = 20


@dataclass
class _Change:
    """A world that is being left: since when (monotonic clock), why, and who has left it."""

    began: float
    reasons: list[str]
    waiting: set[Worker] = field(default_factory=set)
    # The question whether those live that have not left it yet; when it was put.
    signs: SignsOfLife | None = None
    asked: float = 0.0
    # What a rank left it with, empty where nobody met an error.
    error: str = ""
    # The rank that waited in a collective which not all entered.
    stalled: Failed | None = None


class ReformingGroup(WorkerGroup):
    """Loses workers without ending the trial, and forms worlds of those that are left and of others."""

    def __init__(self, launcher: ElasticLauncher, *, timeout_s: float) -> None:
        super().__init__(launcher, timeout_s=timeout_s)
        self._launcher: ElasticLauncher = launcher
        self._joining = JoiningWorkers(launcher)

    def _forget_trial(self) -> None:
        super()._forget_trial()
        self._order: TrialRequest | None = None
        self._change: _Change | None = None
        self._dropped: list[Failed] = []
        self._finished = False
        self._world_number = 0
        self._worlds_without_report = 0
        # Why the world of this trial changed, one text a change.
        self.world_changes: list[str] = []
        # Since when the ranks have been without a world that reports; how long they were the last time.
        self._without_world_since: float | None = None
        self._change_s = 0.0

    def _note_report(self, report: Report) -> None:
        super()._note_report(report)
        self._worlds_without_report = 0
        if self._change is None and self._without_world_since is not None:
            self._change_s = time.monotonic() - self._without_world_since
            self._without_world_since = None

    @property
    def change_facts(self) -> dict[str, Any]:
        changes = self.world_changes
        return {
            "world_changes": len(changes),
            "world_change": changes[-1] if changes else "",
            "world_change_s": round(self._change_s, 3),
        }

    def _note_ended(self) -> None:
        self._finished = True

    def _take_other(self, worker: Worker, message: Any) -> None:
        if not isinstance(message, NeedsWorld):
            super()._take_other(worker, message)
            return
        if self._change is None:
            self._leave_world(self._reason_of_leaving(worker))
        assert self._change is not None
        self._change.waiting.add(worker)
        self._change.error = message.error or self._change.error
        if message.stalled:
            assert worker.facts is not None, "it has a rank"
            self._change.stalled = Failed(
                message.rank, worker.facts.host, FailureKind.STALLED, message.stalled
            )

    def _reason_of_leaving(self, first: Worker) -> str:
        """Return why the world is left that ``first`` has left without a loss."""
        return f"{first.name} lost contact"

    def _lose_those_that_died(self, workers: Sequence[Worker], calls: Sequence[Any]) -> list[Any]:
        """Return what each worker answers, None for those that do not and are lost now."""
        if calls:
            ray.wait(list(calls), num_returns=len(calls), timeout=self._timeout_s)
        answers: list[Any] = [None] * len(calls)
        for number, (worker, call) in enumerate(zip(workers, calls, strict=True)):
            try:
                answers[number] = ray.get(call, timeout=0)
            except RayError as error:
                self._lose_one_of_us(worker, FailureKind.DIED, death_text(error))
        return answers

    def _lose(self, worker: Worker, kind: FailureKind, text: str) -> None:
        if worker not in self.workers:  # it had not joined yet
            self._joining.replace(worker)
            return
        if self._failures or self._finished or self._order is None:
            super()._lose(worker, kind, text)
            return
        fact = worker.facts
        assert fact is not None
        self._lost_nodes.append(fact.node_id)
        self._dropped += [
            Failed(rank, fact.host, kind, f"process {fact.pid}: {text}") for rank in worker.ranks
        ]
        self.workers.remove(worker)
        self._inbox.close_channel(worker.channel)
        # The others do not wait for its host, which may be lost as well.
        actor_processes.end_actors([worker.actor], [fact], wait=False)
        if not self.workers:
            self._failures += self._dropped
            return
        reason = f"{worker.name} {failures.verb_of(kind)}"
        if self._change is None:
            self._leave_world(reason)
        else:
            self._change.waiting.discard(worker)
            if len(self._dropped) == len(worker.ranks):
                self._change.reasons.clear()  # that others lost contact with it is no second reason
            self._change.reasons.append(reason)
            self._break_world()
        self._replace(worker)

    def _look_for_signs_of_life(self, change: _Change) -> None:
        """Give up the ranks of a world that is being left which are dead or do not answer."""
        now = time.monotonic()
        if change.signs is None:
            if now - change.began < ASK_AFTER_S or now - change.asked < ASK_AGAIN_S:
                return
            # All of them: how fast those answer that have left it tells how long the others may take.
            change.signs, change.asked = SignsOfLife(self.workers), now
        silent, dead = change.signs.look()
        if change.signs.are_all_there:
            change.signs = None
        for worker in silent:
            self._lose_one_of_us(
                worker, FailureKind.SILENT, f"does not answer (asked {now - change.asked:.1f} s ago)"
            )
        for worker, error in dead:
            self._lose_one_of_us(worker, FailureKind.DIED, death_text(error))

    def _lose_one_of_us(self, worker: Worker, kind: FailureKind, text: str) -> None:
        """Lose a worker unless that is known already."""
        if worker in self.workers:
            self._lose(worker, kind, text)

    def _replace(self, worker: Worker) -> None:
        if worker.place not in self._joining.places:
            self._joining.start(worker.place)

    def _leave_world(self, reason: str) -> None:
        self._change = _Change(time.monotonic(), [reason])
        if self._without_world_since is None:
            self._without_world_since = self._change.began
        self._break_world()

    def _break_world(self) -> None:
        self._launcher.abandon_world()
        for worker in self.workers:
            worker.actor.break_world.remote(self._world_number)
        self._ask_all()

    def _ask_all(self) -> None:
        for worker in self.workers:
            if not worker.is_asked:
                self._ask(worker)

    def _fail(self, text: str) -> None:
        """End the trial: ranks that were lost are the cause, ``text`` says why the others cannot go on."""
        lost = self._dropped or [
            Failed(rank, worker.facts.host, FailureKind.DISCONNECTED, "")
            for worker in self.workers[:1]
            for rank in worker.ranks[:1]
            if worker.facts is not None
        ]
        self._failures += [replace(lost[0], traceback=f"{lost[0].traceback}\n{text}".strip()), *lost[1:]]

    def _form_next_world(self, joining: Sequence[Worker]) -> None:
        """Give the ranks that are left, and those that join, their places in the next world."""
        assert self._change is not None and self._order is not None
        if self._dropped or self._change.error:
            self._worlds_without_report += 1
        if self._worlds_without_report > WORLDS_WITHOUT_REPORT:
            self._fail(
                f"{WORLDS_WITHOUT_REPORT} worlds in a row broke before anything was reported. "
                f"The last error of a rank was: {self._change.error}"
            )
            return
        reasons = "; ".join(self._change.reasons)
        stayed = list(self.workers)
        workers = [*stayed, *joining]
        facts: list[WorkerInfo] = [worker.facts for worker in workers if worker.facts is not None]
        try:
            # Rank 0 is the one that has been there longest: it has what was committed.
            assignments = self._launcher.assign(
                [worker.actor for worker in workers], facts, first_node=facts[0].node_id
            )
        except StartFailed as error:
            # Which of them it was shows in a moment; the limits of `decide` end this.
            self._change.reasons.append(str(error))
            self._lose_the_silent(workers, timeout_s=MOST_SILENCE_S)
            return
        # The next world has connections of its own. A report that is still on its way is made again there,
        # since it was not let go.
        self._inbox.close_channels()
        self._world_number += 1
        self._change = None
        self._dropped = []
        self._joining.joined(joining)
        # A list of its own: one that dies meanwhile leaves it, while `workers` keeps the order of the calls.
        self.workers = list(workers)
        self._world_size = sum(len(each.worlds) for each in assignments)
        for worker, assignment in zip(workers, assignments, strict=True):
            worker.ranks = tuple(world.rank for world in assignment.worlds)
            worker.running = set(worker.ranks)
        calls = [
            worker.actor.rejoin.remote(each, self._world_number, self._last_report, self._order.resources)
            if worker in stayed
            else worker.actor.assign.remote(each)
            for worker, each in zip(workers, assignments, strict=True)
        ]
        self._lose_those_that_died(workers, calls)
        connect(workers, self._launcher, self._inbox)
        for worker in workers:
            if worker not in self.workers:
                self._inbox.close_channel(worker.channel)
        order = replace(
            self._order,
            reports=self._last_report,
            world_number=self._world_number,
            checkpoint=self._newest or self._order.checkpoint,
        )
        new = [worker for worker in joining if worker in self.workers]
        self._lose_those_that_died(new, [worker.actor.begin.remote(order) for worker in new])
        if self._change is not None:
            # A rank was lost meanwhile. Those that had not begun then have not heard of it.
            self._break_world()
        self._ask_all()
        self.world_changes.append(reasons)

    def _failed(self, first: list[Failed]) -> Any:
        dropped, self._dropped = self._dropped, []
        first += [each for each in dropped if each not in first]
        return super()._failed(first)

    def unwind(self) -> list[str]:
        self._order = self._change = None  # ranks that are lost from now on are not replaced
        return super().unwind()
