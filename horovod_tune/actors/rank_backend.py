"""What Horovod and torch.distributed both implement, below the actors that they share.

A `RankBackend` is in each rank's process, a `WorldRendezvous` in the coordinator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from horovod_tune.messages import FailureKind, RankInfo, WorkerInfo
from horovod_tune.session.committed_state import Collectives, States


class RankBackend(Protocol):
    """A rank's part in its world, which several trials of one process have one after the other."""

    @property
    def collectives(self) -> Collectives:
        """What the ranks of the world agree through."""

    @property
    def states(self) -> States:
        """The states of the backend's own elastic API."""

    def load(self) -> None:
        """Import what a training function needs; takes a second, and is harmless again."""

    def enter(self, world: RankInfo, name: str) -> None:
        """Prepare the world that the training function is about to be called in; ``name`` is that world's."""

    def leave(self) -> None:
        """Leave the world, before the function is called again in another one."""

    def end(self, *, has_returned: bool) -> None:
        """The training function has ended: ranks that still wait for this one must learn of it."""

    def close(self) -> None:
        """Break the world, so that every rank which waits in a collective gets an error."""

    def abort(self) -> None:
        """Break a world that has lost a rank, also while it is formed, without waiting for peers."""

    def keep(self, timeout_s: float) -> list[str]:
        """Make the process's world fit for the next trial; return what is wrong with it."""

    def release(self, timeout_s: float) -> list[str]:
        """Free what the trial's world held, when nothing of the trial's refers to it; return what is left."""

    def describe_failure(self, error: BaseException, output: Any) -> tuple[FailureKind, str, dict[int, str]]:
        """Return the kind of a failure of the training function, and text to add to its traceback.

        Third, what `awaited_ranks` returns, of the collective that the function gave up waiting in.
        ``output`` is the rank's `OutputReader`.
        """

    def world_error(self, text: str) -> BaseException:
        """Return what the training function gets from `report` in a broken world."""

    def awaited_ranks(self, output: Any) -> dict[int, str]:
        """Return the ranks that collectives have long waited for, with the names of the collectives."""


class WorldRendezvous(Protocol):
    """The rendezvous of one trial's worlds, in the coordinator."""

    def open(
        self,
        actors: Sequence[Any],
        infos: Sequence[WorkerInfo],
        rank_infos: Sequence[RankInfo],
        interfaces: Sequence[str],
    ) -> list[dict[str, str]]:
        """Open it for the next world, instead of the one before; return each rank's environment."""

    def abandon(self) -> None:
        """Make ranks that are still entering the latest world abandon it at once."""

    def close(self) -> None:
        """Undo `open`; twice is harmless."""
