"""Runs in the coordinator: lets ranks go on that wait in `report()`, and tells of the newest checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from horovod_tune.coordinator.worker import Worker
from horovod_tune.messages import CheckpointPlace


class Releases:
    """What the ranks of one trial are told at their reports."""

    def __init__(self) -> None:
        # The newest goes with every call, since a call may overtake the one that brought it first.
        self.newest: CheckpointPlace | None = None
        self._next: tuple[int, CheckpointPlace | None] | None = None
        # What was sent last: what a channel has lost comes with the next poll.
        self._sent: tuple[Any, ...] = ()

    def note(self, index: int, checkpoint: CheckpointPlace | None) -> None:
        """Let every rank go on after report ``index`` with the next `send`."""
        self._next = (index, replace(checkpoint, report=index) if checkpoint else None)

    def send(self, workers: Sequence[Worker], run: int, ask: Callable[..., None]) -> None:
        """Send what was noted, if anything was; ``ask(worker, *release)`` polls a worker."""
        if self._next is None:
            return
        index, checkpoint = self._next
        self.newest = checkpoint or self.newest
        self._sent = (index, self.newest)
        self._next = None
        for worker in workers:
            released = worker.release(run, index, self.newest)
            if worker.is_asked:
                if not released:
                    worker.actor.proceed.remote(index, self.newest)
            elif worker.running:
                # Rank 0's worker, if it has no channel, gets both in one call.
                ask(worker, *(() if released else self._sent))

    def lost_to(self, worker: Worker) -> tuple[Any, ...]:
        """Return what a worker was told other than through Ray, which may have been lost."""
        return self._sent if worker.channel is not None else ()

    def send_last(self, workers: Sequence[Worker]) -> None:
        """Rank 0 has returned: ranks that report more often than it have nothing to wait for."""
        for worker in workers:
            worker.actor.proceed.remote(math.inf, self.newest)
