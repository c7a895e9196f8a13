"""The slots of an elastic trial: starts actors for those that have none, and finds workers that must leave.

A worker must leave at the next commit if its node is draining (before a cloud takes the machine away, for
example), or if a scheduler has taken its slot.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import ray
from ray.exceptions import GetTimeoutError, RayError

from horovod_tune.coordinator.backend_protocol import Launcher
from horovod_tune.coordinator.policy import Limits, backoff_s
from horovod_tune.coordinator.trial_state import Leaving
from horovod_tune.coordinator.workers import Worker, end_workers
from horovod_tune.ray_compat import queries

# Interval between queries for draining nodes.
DRAINING_INTERVAL_S = 2.0


class Slots:
    """Starts actors for slots that have none, and keeps track of them until they join a world.

    ``limits.max_workers`` is the number of slots.
    """

    def __init__(self, launcher: Launcher, limits: Limits) -> None:
        # Which workers must leave.
        self.leaving = Leaving(limits)
        self._launcher = launcher
        self._queried_s = float("-inf")
        # Workers that start or wait to join, by slot, in the order in which they were started.
        self._joining: dict[int, Worker] = {}
        # Slots whose next actor starts later: when, by the monotonic clock.
        self._due: dict[int, float] = {}
        self._deaths: dict[int, int] = {}

    @property
    def limits(self) -> Limits:
        return self.leaving.limits

    @property
    def starting(self) -> set[int]:
        """The slots whose actor is starting or waits to join."""
        return {*self._joining, *self._due}

    def start_missing(self, members: Sequence[Worker]) -> None:
        """Start an actor for each slot that has none, without waiting for it."""
        taken = {worker.slot for worker in members} | self.starting
        for slot in range(self.limits.max_workers):
            if slot not in taken:
                self._start(slot)

    def _start(self, slot: int, *, elsewhere: bool = False) -> None:
        self._joining[slot] = Worker(slot, actor=self._launcher.create_one(slot, elsewhere=elsewhere))

    def ready(self, members: Sequence[Worker]) -> list[Worker]:
        """Return the workers that may join ``members`` now, in the order in which they were started."""
        ready = [worker for worker in self._started() if not self.leaving.must_leave(worker)]
        kept = self.leaving.remaining(members) if self.leaving.enough_remain(members, len(ready)) else members
        return ready[: max(0, self.limits.max_workers - len(kept))]

    def _started(self) -> list[Worker]:
        now = time.monotonic()
        for slot in [slot for slot, when in self._due.items() if now >= when]:
            del self._due[slot]
            self._start(slot)
        for worker in list(self._joining.values()):
            try:
                worker.info = ray.get(worker.description, timeout=0)
            except GetTimeoutError:
                continue
            except RayError:
                self.restart_later(worker)
        return [worker for worker in self._joining.values() if worker.info is not None]

    def restart_later(self, worker: Worker) -> None:
        """Replace a worker that died or was unsuitable before it joined a world; the new one starts later."""
        if self._joining.get(worker.slot) is not worker:
            return
        self.end({worker.slot})
        deaths = self._deaths.get(worker.slot, 0)
        self._deaths[worker.slot] = deaths + 1
        self._due[worker.slot] = time.monotonic() + backoff_s(deaths)

    def record_joined(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            del self._joining[worker.slot]
            self._deaths.pop(worker.slot, None)

    def end(self, slots: Collection[int]) -> None:
        """End the actors of these slots that start or wait to join."""
        end_workers([self._joining.pop(slot) for slot in slots if slot in self._joining])
        for slot in slots:
            self._due.pop(slot, None)

    def must_restart_elsewhere(self, members: Sequence[Worker], node_id: str) -> bool:
        """Return True if too few workers would remain on nodes that are not draining.

        ``node_id`` is the coordinator's node, which the trial cannot continue without.
        """
        if node_id in self.leaving.draining:
            return True
        draining = any(map(self.leaving.is_draining, members))
        return draining and not self.leaving.enough_remain(members, len(self.ready(members)))

    def replace_draining(self, members: Sequence[Worker]) -> None:
        """Start replacements for workers on draining nodes, which are queried every few seconds.

        Workers there that have not joined are ended at once.
        """
        now = time.monotonic()
        if now - self._queried_s < DRAINING_INTERVAL_S:
            return
        self._queried_s, self.leaving.draining = now, queries.draining_nodes()
        if not self.leaving.remaining(members):
            return  # if none may stay, the whole trial restarts elsewhere
        draining = {worker.slot for worker in members if self.leaving.is_draining(worker)}
        stuck = {slot for slot, worker in self._joining.items() if self.leaving.is_draining(worker)}
        self.end(stuck)
        taken = self.starting | {worker.slot for worker in self.leaving.remaining(members)}
        for slot in sorted((draining | stuck) - taken):
            if slot < self.limits.max_workers:
                self._start(slot, elsewhere=True)

    def reuse(self, worker: Worker) -> None:
        """Make a former member, whose rank has died, ready to join the next world, unless it must leave."""
        if not self.leaving.must_leave(worker) and worker.slot not in self.starting:
            worker.ranks = ()
            self._joining[worker.slot] = worker
        else:
            end_workers([worker])
            self.replace(worker)

    def replace(self, worker: Worker) -> None:
        """Fill the slot of a former member again, or release it if a scheduler took it."""
        if self.leaving.is_excess(worker):
            self._launcher.release_slot(worker.slot)
        elif worker.slot not in self.starting:
            self._start(worker.slot)

    def release_excess(self, members: Sequence[Worker]) -> None:
        """End actors starting in slots that a scheduler has taken; release those slots without a member."""
        excess = {slot for slot in self.starting if slot >= self.limits.max_workers}
        self.end(excess)
        for slot in excess - {worker.slot for worker in members}:
            self._launcher.release_slot(slot)
