"""Runs in the coordinator: gives workers that have started their ranks, and connects this process to them.

A later world of an elastic trial is formed in `reforming_group`, and connected here as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from horovod_tune.coordinator.backend_protocol import Launcher
from horovod_tune.coordinator.inbox import Inbox
from horovod_tune.coordinator.worker import Worker, call_all
from horovod_tune.spec import PROCESS_START_FACTOR


def form_world(workers: Sequence[Worker], launcher: Launcher, inbox: Inbox, *, timeout_s: float) -> None:
    """Wait until all workers are there, and give each its ranks.

    Raises:
        StartFailed: workers did not start in time, or were placed wrongly.
    """
    facts = call_all(
        workers,
        [worker.description for worker in workers],
        "to start",
        timeout_s=timeout_s,
        times=PROCESS_START_FACTOR,
    )
    for worker, fact in zip(workers, facts, strict=True):
        worker.facts = fact
    assignments = launcher.assign([worker.actor for worker in workers], facts)
    call_all(
        workers,
        [worker.actor.assign.remote(each) for worker, each in zip(workers, assignments, strict=True)],
        "to take their ranks",
        timeout_s=timeout_s,
    )
    for worker, assignment in zip(workers, assignments, strict=True):
        worker.ranks = tuple(world.rank for world in assignment.worlds)
    connect(workers, launcher, inbox)


def connect(workers: Sequence[Worker], launcher: Launcher, inbox: Inbox) -> None:
    """Listen to the workers on this host, which have connected; Ray's calls reach the others.

    ``workers`` are in the order that their ranks were assigned in.
    """
    channels = launcher.channels()
    inbox.add_channels(channels.values())
    for number, worker in enumerate(workers):
        worker.channel = channels.get(number)
