"""Runs in the coordinator: gives workers that have started their ranks, and connects this process to them."""

from __future__ import annotations

from collections.abc import Sequence

from horovod_tune.channel.report_channel import CoordinatorChannel
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
    connected = call_all(
        workers,
        [worker.actor.assign.remote(each) for worker, each in zip(workers, assignments, strict=True)],
        "to take their ranks",
        timeout_s=timeout_s,
    )
    channels = launcher.channels()
    for place, (worker, assignment) in enumerate(zip(workers, assignments, strict=True)):
        worker.ranks = tuple(world.rank for world in assignment.worlds)
        worker.channel = channels.get(place)
    _note_relays(workers, connected)
    inbox.add_channels(channels.values())


def _note_relays(workers: Sequence[Worker], connected: Sequence[bool | None]) -> None:
    """Note through whom workers are reached that are connected, but not to this process."""
    first: dict[str, CoordinatorChannel] = {}
    for worker, is_connected in zip(workers, connected, strict=True):
        assert worker.facts is not None
        if worker.channel is not None:
            first.setdefault(worker.facts.node_id, worker.channel)
        elif is_connected:
            worker.relay = first.get(worker.facts.node_id)
