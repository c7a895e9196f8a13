"""The ranks of an elastic trial, in the coordinator: those that are left form a new world, others join.

When a rank is lost, the coordinator breaks the world on the others (`break_world`), so that none waits in a
collective or a report. Each says `NeedsWorld` when its training function has left it. When all have, the next
world is formed in the same processes: a new rendezvous, a place for each (`rejoin`). Meanwhile a new actor
starts where the lost one was; when it is ready, the ranks hear of it (`offer_growth`), leave their world at
the next commit, and form the next one together with it.
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
from horovod_tune.coordinator.draining import DrainingHosts
from horovod_tune.coordinator.reforming import Decision, decide
from horovod_tune.coordinator.worker import Worker, ping_all
from horovod_tune.coordinator.worker_group import PING_S, WorkerGroup
from horovod_tune.errors import StartFailed
from horovod_tune.messages import Failed, FailureKind, NeedsWorld, Report, TrialOrder, WorkerFacts

# How often the coordinator looks whether the next world can be formed, or an actor has started.
TICK_S = 0.1
# After how many worlds in a row in which nothing was reported the trial fails.
WORLDS_WITHOUT_REPORT = 20


@dataclass
class _Change:
    """A world that is being left: since when (monotonic clock), why, and who has left it."""

    began: float
    reasons: list[str]
    waiting: set[Worker] = field(default_factory=set)
    pinged: float = 0.0


class ElasticGroup(WorkerGroup):
    """A worker group whose trial survives the loss of ranks and grows when there is room.

    Args:
        launcher: as for `WorkerGroup`; it also replaces single actors (`create_one`).
        timeout_s: as for `WorkerGroup`.
        min_workers: the fewest ranks that go on.
        max_workers: the most ranks.
        wait_s: how long fewer than ``min_workers`` wait for others before the trial fails.
    """

    def __init__(
        self,
        launcher: ElasticLauncher,
        *,
        timeout_s: float,
        min_workers: int,
        max_workers: int,
        wait_s: float,
    ) -> None:
        super().__init__(launcher, timeout_s=timeout_s)
        self._launcher: ElasticLauncher = launcher
        self._min_workers, self._max_workers, self._wait_s = min_workers, max_workers, wait_s
        self._joining: list[Worker] = []
        self._offered: set[Worker] = set()
        self._draining = DrainingHosts()

    def _forget_trial(self) -> None:
        super()._forget_trial()
        self._order: TrialOrder | None = None
        self._change: _Change | None = None
        self._dropped: list[Failed] = []
        self._finished = False
        self._last_report = 0
        self._world_number = 0
        self._worlds_without_report = 0
        # Why the world of this trial changed, one text a change.
        self.world_changes: list[str] = []

    def begin(self, order: TrialOrder) -> None:
        super().begin(replace(order, is_elastic=True))
        self._order = replace(order, is_elastic=True, run=self._run)
        taken = {worker.place for worker in [*self.workers, *self._joining]}
        for place in range(self._max_workers):
            if place not in taken:
                self._start_one(place)

    def _start_one(self, place: int, *, elsewhere: bool = False) -> None:
        self._joining.append(Worker(self._launcher.create_one(place, elsewhere=elsewhere), place))

    def _is_going(self, worker: Worker) -> bool:
        """Whether the worker's host is about to go."""
        return worker.facts is not None and worker.facts.node_id in self._draining.nodes

    @property
    def _staying(self) -> list[Worker]:
        return [worker for worker in self.workers if not self._is_going(worker)]

    def may_end_soon(self, node_id: str) -> bool:
        """Whether the coordinator's host goes, or so many ranks' hosts that the others are too few."""
        if node_id in self._draining.nodes:
            return True
        return any(map(self._is_going, self.workers)) and not self._can_do_without(self._ready_to_join())

    def _can_do_without(self, joining: Sequence[Worker]) -> bool:
        """Whether the trial goes on without ranks whose hosts go; one that stays has what was committed."""
        staying = len(self._staying)
        return staying > 0 and staying + len(joining) >= self._min_workers

    def _prepare_to_leave_hosts(self) -> None:
        """Start others in place of those whose host goes, and let the next commit end this world."""
        if not self._draining.look() or self._finished:
            return
        going = [worker for worker in self.workers if self._is_going(worker)]
        if not self._staying:
            return  # the trial will start again elsewhere as a whole
        started = {worker.place for worker in self._joining}
        for worker in going:
            if worker.place not in started:
                self._start_one(worker.place, elsewhere=True)
        if going and self._change is None and self._can_do_without([]):
            self._offer_change()

    def _offer_change(self) -> None:
        for worker in self.workers:
            worker.actor.offer_growth.remote()

    @property
    def _listen_s(self) -> float:
        return TICK_S if self._change is not None or self._joining else super()._listen_s

    def _tend(self, since: float) -> None:
        super()._tend(since)
        if self._failures or not self._running:
            return
        self._prepare_to_leave_hosts()
        ready = self._ready_to_join()
        if self._change is None:
            new = [worker for worker in ready if worker not in self._offered]
            if new and not self._finished:
                self._offered.update(new)
                self._offer_change()
            return
        change = self._change
        if self._finished:
            self._failures += self._dropped  # a rank that has returned forms no world with the others
        elapsed_s = time.monotonic() - change.began
        decision = decide(
            left=len(self.workers),
            waiting=len(change.waiting),
            ready=len(ready),
            min_workers=self._min_workers,
            elapsed_s=elapsed_s,
            wait_s=self._wait_s,
            leave_s=self._timeout_s,
        )
        match decision:
            case Decision.FORM:
                self._form_next_world(ready)
            case Decision.FAIL:
                self._fail(
                    f"{len(self.workers)} rank(s) are left, min_workers={self._min_workers}, and no others "
                    f"came within min_workers_timeout_s={self._wait_s:g} s"
                )
            case Decision.GIVE_UP_RANKS:
                text = f"did not leave its broken world within timeout_s={self._timeout_s:g} s"
                for worker in [each for each in self.workers if each not in change.waiting]:
                    self._lose(worker, FailureKind.HUNG, text)
            case Decision.WAIT_FOR_RANKS if time.monotonic() - max(change.began, change.pinged) > PING_S:
                change.pinged = time.monotonic()
                self._find_silent([each for each in self.workers if each not in change.waiting])

    def _ready_to_join(self) -> list[Worker]:
        """Return the workers that have started and may join, the first to start first."""
        for worker in list(self._joining):
            if worker.loaded is None:
                worker.loaded = worker.actor.load.remote()
            refs = [worker.description, worker.loaded]
            done, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
            if len(done) < len(refs):
                continue
            try:
                worker.facts = ray.get(worker.description)
                ray.get(worker.loaded)
            except RayError:
                # It died while it started: another takes its place.
                self._joining.remove(worker)
                self._start_one(worker.place)
        ready = [
            worker for worker in self._joining if worker.facts is not None and not self._is_going(worker)
        ]
        kept = self._staying if self._can_do_without(ready) else self.workers
        return ready[: max(0, self._max_workers - len(kept))]

    def _find_silent(self, workers: Sequence[Worker]) -> None:
        silent, dead = ping_all(workers, timeout_s=PING_S)
        for worker in silent:
            self._lose(worker, FailureKind.SILENT, f"does not answer (asked for {PING_S:g} s)")
        for worker, error in dead:
            self._lose(worker, FailureKind.DIED, self._death_of(worker, error))

    def _take_other(self, worker: Worker, message: Any) -> None:
        if not isinstance(message, NeedsWorld):
            super()._take_other(worker, message)
            return
        if self._change is None:
            self._leave_world(self._reason_of_leaving(worker))
        assert self._change is not None
        self._change.waiting.add(worker)

    def _reason_of_leaving(self, first: Worker) -> str:
        going = ", ".join(worker.name for worker in self.workers if self._is_going(worker))
        if going:
            return f"the host of {going} is about to go"
        return "more workers join" if self._offered else f"{first.name} lost contact"

    def _note_report(self, report: Report) -> None:
        super()._note_report(report)
        self._last_report = max(self._last_report, report.index)
        self._worlds_without_report = 0

    def _note_ended(self) -> None:
        self._finished = True

    def _lose(self, worker: Worker, kind: FailureKind, text: str) -> None:
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
        actor_processes.end_actors([worker.actor], [fact], lost_nodes=[fact.node_id])
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
        self._start_one(worker.place)

    def _leave_world(self, reason: str) -> None:
        self._change = _Change(time.monotonic(), [reason])
        self._break_world()

    def _break_world(self) -> None:
        for worker in self.workers:
            worker.actor.break_world.remote(self._world_number)
            if not worker.is_asked:
                self._ask(worker)

    def dump_commit(self) -> bytes | None:
        """Return what the ranks have committed last, as bytes; None where they have committed nothing."""
        for worker in self.workers:
            try:
                dumped: bytes | None = ray.get(worker.actor.dump_commit.remote(), timeout=self._timeout_s)
            except RayError:
                continue  # it is noted as lost when it is listened to
            return dumped
        return None

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
        self._worlds_without_report += 1
        if self._worlds_without_report > WORLDS_WITHOUT_REPORT:
            self._fail(f"{WORLDS_WITHOUT_REPORT} worlds in a row broke before anything was reported")
            return
        reasons = "; ".join(self._change.reasons)
        if self._can_do_without(joining):
            self._end_those_who_go()
        stayed = list(self.workers)
        workers = [*stayed, *joining]
        facts: list[WorkerFacts] = [worker.facts for worker in workers if worker.facts is not None]
        try:
            # Rank 0 is the one that has been there longest: it has what was committed.
            assignments = self._launcher.assign(
                [worker.actor for worker in workers], facts, first_node=facts[0].node_id
            )
        except StartFailed as error:
            # Which of them it was shows in a moment; the limits of `decide` end this.
            self._change.reasons.append(str(error))
            self._find_silent(workers)
            return
        self._world_number += 1
        self._change = None
        self._dropped = []
        self._offered.clear()
        self._joining = [worker for worker in self._joining if worker not in joining]
        # A list of its own: one that dies meanwhile leaves it, while `workers` keeps the order of the calls.
        self.workers = list(workers)
        self._world_size = sum(len(each.worlds) for each in assignments)
        for worker, assignment in zip(workers, assignments, strict=True):
            worker.ranks = tuple(world.rank for world in assignment.worlds)
            worker.running = set(worker.ranks)
        calls = [
            worker.actor.rejoin.remote(each, self._world_number, self._last_report)
            if worker in stayed
            else worker.actor.assign.remote(each)
            for worker, each in zip(workers, assignments, strict=True)
        ]
        self._lose_those_that_died(workers, calls)
        channels = self._launcher.channels()
        for place, worker in enumerate(workers):
            if place in channels:
                worker.channel = channels[place]
        self._inbox.add_channels(channels.values())
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
        for worker in self.workers:
            if not worker.is_asked:
                self._ask(worker)
        self.world_changes.append(reasons)

    def _end_those_who_go(self) -> None:
        going = [worker for worker in self.workers if self._is_going(worker)]
        self.workers = self._staying
        for worker in going:
            self._inbox.close_channel(worker.channel)
            assert worker.facts is not None
            actor_processes.end_actors([worker.actor], [worker.facts])

    def _lose_those_that_died(self, workers: Sequence[Worker], calls: Sequence[Any]) -> None:
        ray.wait(list(calls), num_returns=len(calls), timeout=self._timeout_s) if calls else None
        for worker, call in zip(workers, calls, strict=True):
            try:
                ray.get(call, timeout=0)
            except RayError as error:
                if worker in self.workers:
                    self._lose(worker, FailureKind.DIED, self._death_of(worker, error))

    def _failed(self, first: list[Failed]) -> Any:
        dropped, self._dropped = self._dropped, []
        first += [each for each in dropped if each not in first]
        return super()._failed(first)

    def unwind(self) -> list[str]:
        self._order = self._change = None  # ranks that are lost from now on are not replaced
        return super().unwind()

    def end_trial(self) -> list[str]:
        problems = super().end_trial()
        if not problems and (self.world_changes or self._joining):
            return ["the world of the trial changed its size"]
        return problems

    def close(self) -> None:
        joining, self._joining = self._joining, []
        actor_processes.end_actors([worker.actor for worker in joining], [])
        super().close()
