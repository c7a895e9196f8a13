"""Which collectives wait for a rank whose training function has returned: nothing else would end that wait.

Horovod's stall inspector names the ranks that a collective waits for, about a minute after it has begun; it
does not know that one of them never comes. The coordinator does.
"""

from __future__ import annotations

import time
from collections.abc import Set
from typing import Any

import ray
from ray.exceptions import RayError

from horovod_tune.coordinator.worker import Worker

# How often rank 0 is asked, and how long after the first rank has returned: the others mostly follow at once.
ASK_EVERY_S = 5.0


class EarlyReturns:
    """A question to rank 0's worker, put again and again while some ranks have returned and others run."""

    def __init__(self) -> None:
        self._question: Any = None
        self._next_s: float | None = None
        # The ranks that had returned when the newest question was put, and when the one before it was. An
        # answer covers the time between the two: what it says of the latter was said after they returned.
        self._returned_at_question: Set[int] = frozenset()
        self._returned_before: Set[int] = frozenset()

    def look(self, worker: Worker, returned: Set[int]) -> dict[int, str]:
        """Return the ranks of ``returned`` that collectives wait for, each with the collectives' names.

        Args:
            worker: rank 0's.
            returned: the ranks whose training function has returned, while that of others runs.
        """
        now = time.monotonic()
        if not returned:
            self._next_s = None
            return {}
        if self._next_s is None:
            self._next_s = now + ASK_EVERY_S
        if self._question is None:
            if now >= self._next_s:
                self._next_s = now + ASK_EVERY_S
                self._returned_before = self._returned_at_question
                self._returned_at_question = frozenset(returned)
                self._question = worker.actor.awaited_ranks.remote()
            return {}
        if not ray.wait([self._question], timeout=0)[0]:
            return {}
        question, self._question = self._question, None
        try:
            awaited: dict[int, str] = ray.get(question)
        except RayError:
            return {}  # it is noted as lost when it is listened to
        return {rank: names for rank, names in awaited.items() if rank in self._returned_before}
