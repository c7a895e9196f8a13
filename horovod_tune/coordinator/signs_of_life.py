"""Which workers give no sign of life, asked while the coordinator goes on listening to all of them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import ray
from ray.exceptions import RayError

from horovod_tune.coordinator.worker import Worker

# The least and the most that a worker may take to answer while others wait for it.
LEAST_SILENCE_S = 1.5
MOST_SILENCE_S = 5.0


def silence_limit_s(slowest_answer_s: float | None) -> float:
    """Return how long a worker may take to answer, when the slowest answer of the others took so long.

    On a machine with more work than cores all of them are slow, and none of them is lost. Where nobody has
    answered there is nothing to compare with.

    >>> [silence_limit_s(answer) for answer in (0.0, 0.25, 2.0, None)]
    [1.5, 2.5, 5.0, 5.0]
    """
    if slowest_answer_s is None:
        return MOST_SILENCE_S
    return min(MOST_SILENCE_S, LEAST_SILENCE_S + 4 * slowest_answer_s)


class SignsOfLife:
    """One question to several workers, whose answers are looked at as they come."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._waiting = {worker.actor.ping.remote(): worker for worker in workers}
        self._began = time.monotonic()
        self._slowest_s: float | None = None

    @property
    def are_all_there(self) -> bool:
        """Whether nobody's answer is waited for any more."""
        return not self._waiting

    def look(self) -> tuple[list[Worker], list[tuple[Worker, RayError]]]:
        """Return the workers that have been silent for too long, and those that died; each of them once."""
        if not self._waiting:
            return [], []
        elapsed_s = time.monotonic() - self._began
        ready, _ = ray.wait(list(self._waiting), num_returns=len(self._waiting), timeout=0)
        dead = []
        for ref in ready:
            worker = self._waiting.pop(ref)
            try:
                ray.get(ref)
            except RayError as error:
                dead.append((worker, error))
            else:
                self._slowest_s = elapsed_s
        if elapsed_s <= silence_limit_s(self._slowest_s):
            return [], dead
        silent = list(self._waiting.values())
        self._waiting.clear()
        return silent, dead
