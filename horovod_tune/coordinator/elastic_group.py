"""The ranks of an elastic trial, in the coordinator: those that are left form a new world, others join.

Where a rank is lost, a new actor starts; when it is ready, the ranks hear of it (`offer_change`), leave their
world at the next commit, and form the next one together with it (`reforming_group`). So do those whose host
is about to go, without them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import ray
from ray.exceptions import RayError

from horovod_tune.coordinator import actor_processes
from horovod_tune.coordinator.backend_protocol import ElasticLauncher
from horovod_tune.coordinator.draining import DrainingHosts
from horovod_tune.coordinator.reforming import Decision, decide
from horovod_tune.coordinator.reforming_group import ReformingGroup
from horovod_tune.coordinator.worker import Worker, ping_all
from horovod_tune.coordinator.worker_group import PING_S
from horovod_tune.errors import StartFailed
from horovod_tune.messages import FailureKind, TrialRequest

# How often the coordinator looks whether the next world can be formed, or an actor has started.
TICK_S = 0.1
# Ranks that are to leave at their next commit are told again until they do, after so long and after twice as
# long each time: one that has only just begun in its world may not have heard it.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0


class ElasticGroup(ReformingGroup):
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
        self._min_workers, self._max_workers, self._wait_s = min_workers, max_workers, wait_s
        self._draining = DrainingHosts()
        self._function: bytes | None = None

    def _forget_trial(self) -> None:
        super()._forget_trial()
        self._forget_offers()

    def _forget_offers(self) -> None:
        self._has_others_to_offer = False
        self._next_offer, self._pause_s = 0.0, FIRST_PAUSE_S

    def _form_world(self) -> None:
        while True:
            try:
                super()._form_world()
                return
            except StartFailed:
                if not self._go_on_without_the_lost():
                    raise

    def _go_on_without_the_lost(self) -> bool:
        """Drop the workers that died, or else those that do not answer; False where too few are left."""
        silent, dead = ping_all(self.workers, timeout_s=PING_S)
        lost = [worker for worker, _ in dead] or silent
        if not lost or len(self.workers) - len(lost) < self._min_workers:
            return False
        self.workers = [worker for worker in self.workers if worker not in lost]
        actor_processes.end_actors(
            [worker.actor for worker in lost], [worker.facts for worker in lost if worker.facts is not None]
        )
        return True

    def _start_training(self, order: TrialRequest) -> None:
        # Those that join later have not had the function, which comes with the first trial only.
        self._function = order.function or self._function
        order = replace(order, is_elastic=True)
        self._order = replace(order, function=self._function)
        shared = self._share(order)
        calls = [worker.actor.begin.remote(shared) for worker in self.workers]
        for worker in self.workers:
            worker.running = set(worker.ranks)
        self._lose_those_that_died(list(self.workers), calls)
        self._ask_all()
        self._start_missing()

    def _start_missing(self) -> None:
        """Begin to start an actor for each slot that has none."""
        taken = {worker.place for worker in self.workers} | self._joining.places
        for place in range(self._max_workers):
            if place not in taken:
                self._joining.start(place)

    def resize(self, workers: int, resources: bytes) -> bool:
        if self._failures or self._finished or not self._running or not self._has_committed():
            return False
        if workers < self._launcher.placed_workers:
            return False  # Ray takes back a placement group as a whole
        assert self._order is not None, "ranks run"
        self._max_workers, self._order = workers, replace(self._order, resources=resources)
        dropped = {place for place in self._joining.places if place >= workers}
        self._joining.drop(dropped)
        for place in dropped - {worker.place for worker in self.workers}:
            self._launcher.give_back(place)
        self._start_missing()
        self._offer_change_if_due([])
        return True

    def _has_committed(self) -> bool:
        """Whether the ranks have something to go on with in another world."""
        for worker in self.workers:
            try:
                answer: bool = ray.get(worker.actor.has_committed.remote(), timeout=PING_S)
            except RayError:
                continue  # it is noted as lost when it is listened to
            return answer
        return False

    def _replace(self, worker: Worker) -> None:
        if self._is_surplus(worker):
            self._launcher.give_back(worker.place)
        else:
            super()._replace(worker)

    def _is_surplus(self, worker: Worker) -> bool:
        """Whether a scheduler has taken the worker's slot from the trial."""
        return worker.place >= self._max_workers

    def _is_going(self, worker: Worker) -> bool:
        """Whether the worker is to leave at the next commit: its host goes, or it is one too many."""
        return self._is_surplus(worker) or self._is_on_going_host(worker)

    def _is_on_going_host(self, worker: Worker) -> bool:
        return worker.facts is not None and worker.facts.node_id in self._draining.nodes

    @property
    def _staying(self) -> list[Worker]:
        return [worker for worker in self.workers if not self._is_going(worker)]

    def may_end_soon(self, node_id: str) -> bool:
        """Whether the coordinator's host goes, or so many ranks' hosts that the others are too few."""
        if node_id in self._draining.nodes:
            return True
        going = any(map(self._is_on_going_host, self.workers))
        return going and not self._can_do_without(self._ready_to_join())

    def _can_do_without(self, joining: Sequence[Worker]) -> bool:
        """Whether the trial goes on without ranks whose hosts go; one that stays has what was committed."""
        staying = len(self._staying)
        return staying > 0 and staying + len(joining) >= self._min_workers

    def _prepare_to_leave_hosts(self) -> None:
        """Start others in place of those whose host goes."""
        if not self._draining.look() or self._finished:
            return
        going = [worker for worker in self.workers if self._is_on_going_host(worker)]
        if not self._staying:
            return  # the trial will start again elsewhere as a whole
        started = self._joining.places
        for worker in going:
            if worker.place not in started and not self._is_surplus(worker):
                self._joining.start(worker.place, elsewhere=True)

    def _offer_change_if_due(self, ready: Sequence[Worker]) -> None:
        """Let the next commit end this world where others are ready to join, or some are to leave."""
        is_to_shrink = any(map(self._is_going, self.workers)) and self._can_do_without([])
        if self._change is not None or self._finished or not (ready or is_to_shrink):
            return
        self._has_others_to_offer |= bool(ready)
        now = time.monotonic()
        if now < self._next_offer:
            return
        self._next_offer = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        for worker in self.workers:
            worker.actor.offer_change.remote(self._world_number)

    @property
    def _listen_s(self) -> float:
        return TICK_S if self._change is not None or self._joining else super()._listen_s

    def _tend(self, since: float) -> None:
        super()._tend(since)
        if self._failures or not self._running:
            return
        self._prepare_to_leave_hosts()
        ready = self._ready_to_join()
        self._offer_change_if_due(ready)
        if self._change is None:
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
            case Decision.FORM if change.stalled is not None and not self._dropped:
                # Nobody hangs: the ranks call different collectives, and would again in the next world.
                self._failures.append(change.stalled)
            case Decision.FORM:
                if self._can_do_without(ready):
                    self._end_those_who_go()
                self._forget_offers()
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
            case Decision.WAIT_FOR_RANKS:
                self._look_for_signs_of_life(change)

    def _ready_to_join(self) -> list[Worker]:
        """Return the workers that may join, the first to start first."""
        ready = [worker for worker in self._joining.ready() if not self._is_going(worker)]
        kept = self._staying if self._can_do_without(ready) else self.workers
        return ready[: max(0, self._max_workers - len(kept))]

    def _reason_of_leaving(self, first: Worker) -> str:
        """Return why the world is left that ``first`` has left without a loss."""
        going = ", ".join(worker.name for worker in self.workers if self._is_on_going_host(worker))
        if going:
            return f"the host of {going} is about to go"
        if any(map(self._is_surplus, self.workers)):
            return f"a scheduler left the trial {self._max_workers} rank(s)"
        return "more workers join" if self._has_others_to_offer else super()._reason_of_leaving(first)

    def _end_those_who_go(self) -> None:
        going = [worker for worker in self.workers if self._is_going(worker)]
        self.workers = self._staying
        for worker in going:
            self._inbox.close_channel(worker.channel)
            assert worker.facts is not None
            actor_processes.end_actors([worker.actor], [worker.facts])
            if self._is_surplus(worker):
                self._launcher.give_back(worker.place)

    def end_trial(self) -> list[str]:
        problems = super().end_trial()
        if not problems and (self.world_changes or self._joining):
            return ["the world of the trial changed its size"]
        return problems

    def close(self) -> None:
        self._joining.end()
        super().close()
