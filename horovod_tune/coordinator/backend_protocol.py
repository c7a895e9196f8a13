"""The interface that every backend implements: a worker's actor, and the launcher that starts workers.

A *worker* is a Ray actor that runs one rank (Gloo) or all ranks of a host (XLA). The worker group calls
workers through these methods only, and every message names the rank that sent it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from horovod_tune.channel.report_channel import CoordinatorChannel
from horovod_tune.messages import Assignment, CheckpointPlace, Message, ResetResult, TrialRequest, WorkerInfo


class WorkerActor(Protocol):
    """The methods of a worker's actor; none blocks longer than documented."""

    def describe(self) -> WorkerInfo:
        """Return where the actor was placed."""

    def assign(self, assignment: Assignment) -> None:
        """Set the ranks and their environment; called again if another worker died during the start."""

    def begin(self, request: TrialRequest) -> None:
        """Start the training function on every rank of the worker; returns at once."""

    def poll(
        self, wait_s: float, proceed: int = 0, checkpoint: CheckpointPlace | None = None
    ) -> list[Message]:
        """Return new messages, after ``wait_s`` seconds at the latest: the worker's heartbeat."""

    def proceed(self, index: float, checkpoint: CheckpointPlace | None = None) -> None:
        """Release the reports up to ``index`` on every rank of the worker."""

    def stop_training(self) -> None:
        """Make the current or next report unwind the training function."""

    def close_world(self) -> None:
        """Break the ranks' collectives, so that ranks which wait in one get an error."""

    def end_process(self) -> None:
        """Close the world, and run what runs at a process's exit: the process is killed after this."""

    def dump_commit(self) -> bytes | None:
        """Return what the worker's rank has committed last; None if it has committed nothing."""

    def send_logs(self) -> None:
        """Make `poll` answer now, with what each rank of the worker has printed, even if that is nothing."""

    def reset(self, join_s: float) -> ResetResult:
        """Wait ``join_s`` for the training function to end, then restore the process to a new one's state."""


class Launcher(Protocol):
    """Starts the workers of one trial and assigns their ranks."""

    def create(self) -> Sequence[Any]:
        """Create the workers' actors and return their handles, without waiting for them."""

    def assign(self, workers: Sequence[Any], infos: Sequence[WorkerInfo]) -> Sequence[Assignment]:
        """Return each worker's ranks and environment.

        Raises:
            StartFailed: the workers were placed where they cannot form the world that was requested.
        """

    def channels(self) -> dict[int, CoordinatorChannel]:
        """Return the channels of the workers that are connected to this process since `assign`, by index."""

    def processes_below(self) -> Sequence[WorkerInfo]:
        """Return the processes that workers have started for their ranks and that must end with them."""

    def close(self) -> None:
        """Undo what `assign` started; twice is harmless."""


class ElasticLauncher(Launcher, Protocol):
    """A launcher whose world may change: single actors come and go."""

    @property
    def placed_workers(self) -> int:
        """How many slots the trial's placement group holds, which Ray takes back together."""

    def release_slot(self, slot: int) -> None:
        """Release the resources of a slot beyond the trial's placement group."""

    def create_one(self, slot: int, *, elsewhere: bool = False, again: bool = False) -> Any:
        """Create the actor of a slot and return its handle, without waiting for it.

        ``elsewhere``: not on the slot's previous host, which is draining. ``again``: instead of one that
        died on its start, in the same group.
        """

    def abandon_world(self) -> None:
        """Make ranks that are still entering the latest world abandon it at once: it lacks a rank."""

    def assign(
        self, workers: Sequence[Any], infos: Sequence[WorkerInfo], *, first_node: str | None = None
    ) -> Sequence[Assignment]:
        """Return each worker's ranks and environment; the first worker on ``first_node`` is rank 0."""
