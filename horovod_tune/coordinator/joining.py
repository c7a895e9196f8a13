"""The training actors of an elastic trial that have no ranks yet: they start, and join at the next world."""

from __future__ import annotations

import time
from collections.abc import Collection

import ray
from ray.exceptions import RayError

from horovod_tune.coordinator import actor_processes
from horovod_tune.coordinator.backend_protocol import ElasticLauncher
from horovod_tune.coordinator.worker import Worker

# How long a slot waits whose actor died while it started; twice as long after each further one.
RETRY_S = 0.5
LONGEST_RETRY_S = 60.0


class JoiningWorkers:
    """Starts actors for slots, again where one dies meanwhile, and keeps them until they are in a world."""

    def __init__(self, launcher: ElasticLauncher) -> None:
        self._launcher = launcher
        self._workers: list[Worker] = []
        # The slots whose next actor starts later: when (monotonic clock), and whether on another host.
        self._due: dict[int, tuple[float, bool]] = {}
        self._deaths: dict[int, int] = {}

    @property
    def places(self) -> set[int]:
        """The slots that are taken care of."""
        return {worker.place for worker in self._workers} | set(self._due)

    def __bool__(self) -> bool:
        return bool(self._workers or self._due)

    def start(self, place: int, *, elsewhere: bool = False, again: bool = False) -> None:
        """Begin to start an actor for a slot; ``elsewhere``: not on the host that the trial has for it."""
        actor = self._launcher.create_one(place, elsewhere=elsewhere, again=again)
        self._workers.append(Worker(actor, place, elsewhere=elsewhere))

    def ready(self) -> list[Worker]:
        """Return the workers that have started and may join, the first to start first."""
        now = time.monotonic()
        for place, (when, elsewhere) in list(self._due.items()):
            if now >= when:
                del self._due[place]
                self.start(place, elsewhere=elsewhere, again=True)
        for worker in list(self._workers):
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
                self.replace(worker)
        return [worker for worker in self._workers if worker.facts is not None]

    def replace(self, worker: Worker) -> None:
        """Start another, after a while, in place of one that died before it had joined."""
        self._workers.remove(worker)
        actor_processes.end_actors([worker.actor], [worker.facts] if worker.facts is not None else [])
        deaths = self._deaths.get(worker.place, 0)
        self._deaths[worker.place] = deaths + 1
        wait_s = min(LONGEST_RETRY_S, RETRY_S * 2**deaths)
        self._due[worker.place] = (time.monotonic() + wait_s, worker.elsewhere)

    def drop(self, places: Collection[int]) -> None:
        """Start nothing for these slots any more, and end what has been started for them."""
        dropped = [worker for worker in self._workers if worker.place in places]
        self._workers = [worker for worker in self._workers if worker not in dropped]
        self._due = {place: when for place, when in self._due.items() if place not in places}
        actor_processes.end_actors(
            [worker.actor for worker in dropped],
            [worker.facts for worker in dropped if worker.facts is not None],
        )

    def joined(self, workers: Collection[Worker]) -> None:
        """Forget workers that have their place in a world."""
        self._workers = [worker for worker in self._workers if worker not in workers]
        for worker in workers:
            self._deaths.pop(worker.place, None)

    def end(self) -> None:
        """End all of them."""
        workers, self._workers = self._workers, []
        self._due.clear()
        actor_processes.end_actors([worker.actor for worker in workers], [])
