"""One worker as the coordinator sees it: its actor, where it landed, its ranks, and what it was asked.

A *worker* is a training actor that runs one rank (Gloo) or all ranks of a host (XLA).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from horovod_tune.channel.report_channel import CoordinatorChannel
from horovod_tune.coordinator.inbox import Inbox
from horovod_tune.errors import StartFailed
from horovod_tune.messages import CheckpointPlace, WorkerInfo
from horovod_tune.spec import START_S_PER_WORKER, start_timeout_s

logger = logging.getLogger(__name__)


class Worker:
    """Everything that the coordinator knows of one training actor.

    ``facts`` is None until the actor has said where it landed, ``ranks`` is empty until it was given them,
    ``channel`` is None where it is not connected to this process.
    ``running`` holds its ranks whose training function runs. ``place`` is its slot of the trial;
    ``elsewhere`` tells that it is not on the host that the trial has for that slot.
    """

    def __init__(self, actor: Any, place: int, *, elsewhere: bool = False) -> None:
        self.actor = actor
        self.place = place
        self.elsewhere = elsewhere
        self.loaded: Any = None
        self.facts: WorkerInfo | None = None
        self.ranks: tuple[int, ...] = ()
        self.channel: CoordinatorChannel | None = None
        self.running: set[int] = set()
        self.description = actor.describe.remote()
        self._question: int | None = None
        self._asked_at = 0.0

    @property
    def name(self) -> str:
        """The worker's name in errors: its ranks and host, as far as they are known.

        >>> class Actor:
        ...     class describe: remote = staticmethod(lambda: None)
        >>> worker = Worker(Actor, place=0)
        >>> worker.name
        'a training actor that has not started'
        >>> worker.facts, worker.ranks = WorkerInfo("n", "10.0.0.1", "a", 7, 0.0), (2, 3)
        >>> worker.name
        'ranks 2-3 on a'
        """
        if self.facts is None:
            return "a training actor that has not started"
        if not self.ranks:
            return f"the training actor in process {self.facts.pid} on {self.facts.host}"
        first, last = self.ranks[0], self.ranks[-1]
        return f"{f'rank {first}' if first == last else f'ranks {first}-{last}'} on {self.facts.host}"

    @property
    def is_asked(self) -> bool:
        """Whether it has a `poll` to answer."""
        return self._question is not None

    def ask(self, inbox: Inbox, wait_s: float, *proceed: Any) -> None:
        """Poll the worker; the answer arrives in ``inbox``, ``proceed`` is passed on with the call."""
        assert not self.is_asked, "the answer to the first question would be lost"
        self._question = inbox.expect(self.actor.poll.remote(wait_s, *proceed))
        self._asked_at = time.monotonic()

    def has_answered(self, question: int) -> bool:
        """Whether the answer to ``question`` is this worker's; then it has none to answer any more."""
        if self._question != question:
            return False
        self._question = None
        return True

    def forget_question(self) -> None:
        """Wait no more for the answer to `ask`."""
        self._question = None

    def silent_s(self, wait_s: float, listening_since: float) -> float:
        """Return for how many seconds the worker has owed its answer, 0 where it owes none.

        Args:
            wait_s: how long it may take to answer when it has nothing to say.
            listening_since: by the monotonic clock. Time in which nobody listened (Tune was deciding) does
                not count.
        """
        if self._question is None:
            return 0.0
        return max(0.0, time.monotonic() - max(self._asked_at + wait_s, listening_since))

    def release(self, run: int, index: int, checkpoint: CheckpointPlace | None) -> bool:
        """Let reports up to ``index`` of trial ``run`` return without Ray; False where it must be a call."""
        return self.channel is not None and self.channel.release(run, index, checkpoint)


def call_all(
    workers: Sequence[Worker], refs: Sequence[Any], doing: str, *, timeout_s: float, times: int = 1
) -> list[Any]:
    """Return what every worker answers; ``refs`` are in the order of ``workers``.

    Raises:
        StartFailed: one did not answer within ``times`` times `start_timeout_s`, or died; says which.
    """
    once_s = start_timeout_s(timeout_s, len(workers))
    for waited in range(1, times + 1):
        try:
            return ray.get(list(refs), timeout=once_s)
        except GetTimeoutError:
            ready = set(ray.wait(list(refs), num_returns=len(refs), timeout=0)[0])
            missing = [worker.name for worker, ref in zip(workers, refs, strict=True) if ref not in ready]
        except RayActorError as error:
            dead = [worker.name for worker, ref in zip(workers, refs, strict=True) if _has_died(ref)]
            raise StartFailed(f"{', '.join(dead)} died on its way {doing}: {error}") from error
        if waited < times:
            logger.warning(
                "%d of %d training actors have taken longer than %g s %s; they have %g s more: %s",
                *(len(missing), len(refs), waited * once_s, doing, (times - waited) * once_s),
                ", ".join(missing),
            )
    multiplied = f", {times} times" if times > 1 else ""
    raise StartFailed(
        f"{len(missing)} of {len(refs)} training actors took longer than {times * once_s:g} s {doing} "
        f"(timeout_s={timeout_s:g} s, and {START_S_PER_WORKER} s for each{multiplied}): {', '.join(missing)}"
    )


def _has_died(ref: Any) -> bool:
    try:
        ray.get(ref, timeout=0)
    except RayActorError:
        return True
    except RayError:  # it has not answered yet, or its method raised
        return False
    return False


def ping_all(
    workers: Sequence[Worker], *, timeout_s: float
) -> tuple[list[Worker], list[tuple[Worker, RayError]]]:
    """Ask workers for a sign of life; return those that gave none in ``timeout_s``, and those that died."""
    refs = {worker.actor.ping.remote(): worker for worker in workers}
    if not refs:
        return [], []
    ready, waiting = ray.wait(list(refs), num_returns=len(refs), timeout=timeout_s)
    dead = []
    for ref in ready:
        try:
            ray.get(ref)
        except RayError as error:
            dead.append((refs[ref], error))
    return [refs[ref] for ref in waiting], dead
