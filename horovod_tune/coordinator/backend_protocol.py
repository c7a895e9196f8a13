"""The interface that every backend implements: a worker's actor, and the launcher that starts workers.

A *worker* is a Ray actor that starts one rank, or with torch_xla all ranks of a host. The coordinator calls
workers only through these methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from horovod_tune.channel.report_channel import CoordinatorChannel
from horovod_tune.messages import (
    Assignment,
    CheckpointPlace,
    LogChunk,
    Message,
    TrialRequest,
    WorkerInfo,
)


class WorkerActor(Protocol):
    """The methods of a worker's actor; none blocks longer than documented."""

    def describe(self) -> WorkerInfo:
        """Return the actor's node and process, once ranks can start with what they need imported."""

    def begin(self, assignment: Assignment, request: TrialRequest) -> None:
        """Start a process for each rank of the worker, and the training function in it; wait for neither."""

    def poll(self, wait_s: float) -> list[Message]:
        """Return new messages within ``wait_s`` seconds; the reply is the worker's heartbeat.

        While a signal has stopped the rank's process, the worker sends none.
        """

    def acknowledge(self, run: int, index: float, checkpoint: CheckpointPlace | None) -> None:
        """Make `report` return on every rank of the worker, for reports up to ``index`` of trial ``run``."""

    def stop_training(self) -> None:
        """Make the current or next report unwind the training function."""

    def close_world(self) -> None:
        """Close the world's connections, so that ranks which wait in a collective get an error."""

    def end_trial(self, timeout_s: float) -> tuple[list[LogChunk], str]:
        """Wait until the processes of the worker's ranks have ended; kill those that remain.

        Returns what they printed at the end, and a warning about those that were killed, or an empty text.
        """

    def end_process(self, timeout_s: float) -> None:
        """Close the world, and give the ranks ``timeout_s`` to end; the actor is killed after this."""

    def dump_commit(self) -> bytes | None:
        """Return the last commit of the worker's rank; None if it has committed nothing."""

    def reply_now(self) -> None:
        """Make `poll` reply immediately, with a `LogChunk` even for ranks that have printed nothing."""

    # The coordinator calls the following only in elastic trials, whose workers have one rank each.

    def break_world(self, number: int) -> None:
        """Make the rank leave world ``number``, which has lost a rank, unless it has left already."""

    def rejoin(self, assignment: Assignment, number: int, reports: int, resources: bytes) -> None:
        """Join the trial's next world, which the rank waits for and whose number is ``number``."""

    def offer_change(self, number: int) -> None:
        """Make the next commit end world ``number``, since ranks want to join or must leave."""

    def can_restore(self) -> bool:
        """Return True if the rank's function commits, so that the rank can continue in another world."""


class Launcher(Protocol):
    """Starts the workers of one trial and assigns their ranks."""

    def create(self) -> Sequence[Any]:
        """Create the workers' actors, without waiting for them; return their handles."""

    def assign(
        self, workers: Sequence[Any], infos: Sequence[WorkerInfo], *, first_node: str | None = None
    ) -> Sequence[Assignment]:
        """Return each worker's ranks and environment.

        Rank 0 is on ``first_node``, which only elastic trials pass, or else on the coordinator's node.

        Raises:
            StartFailed: the workers were placed where they cannot form the world that was requested.
        """

    def channels(self) -> dict[int, CoordinatorChannel]:
        """Return the channels of the workers that have connected to this process since `assign`, by index."""

    def processes_below(self) -> Sequence[WorkerInfo]:
        """Return the processes that workers have started for their ranks, which must end with them."""

    def close(self) -> None:
        """Undo what `assign` and `create_one` started; may be called twice."""

    # The coordinator calls the following only in elastic trials.

    def release_slot(self, slot: int) -> None:
        """Release the resources of a slot beyond the trial's placement group."""

    def create_one(self, slot: int, *, elsewhere: bool = False) -> Any:
        """Create the actor of a slot, without waiting for it; return its handle.

        It gets the resources of the slot's last actor, or with ``elsewhere`` others, since that host drains.
        """

    def abandon_world(self) -> None:
        """Make ranks that are still entering the latest world fail immediately, since it has lost a rank."""
