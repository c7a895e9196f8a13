"""The interfaces that Horovod's and torch.distributed's backends implement for the actors that they share.

A `RankBackend` is in each rank's process; it inherits the methods that have a default. `OpenRendezvous` is
called in the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from horovod_tune.messages import FailureKind, RankInfo, WorkerInfo
from horovod_tune.session.committed_state import Collectives, States
from horovod_tune.session.session import WorldBroken


class RankBackend(Protocol):
    """The backend in one rank's process, which runs several trials in turn."""

    # The collectives of `commit` and `get_state`.
    collectives: Collectives
    # The states of the backend's own elastic API.
    states: States

    def load(self) -> None:
        """Import what a training function needs, which takes a second the first time."""

    def enter(self, rank_info: RankInfo, name: str) -> None:
        """Prepare the world ``name``, in which the training function is about to be called."""

    def leave(self) -> None:
        """Leave the world before the function is called again in another one; by default, call `end`."""
        self.end(has_returned=False)

    def end(self, *, has_returned: bool) -> None:
        """Raise an error in ranks that still wait for this one, since its training function has ended."""

    def close(self) -> None:
        """Break the world, so that every rank which waits in a collective gets an error."""

    def abort(self) -> None:
        """Break a world that has lost a rank, even while it is being formed, without waiting for peers."""

    def keep(self, timeout_s: float) -> list[str]:
        """Prepare this process's world for the next trial; return why it cannot be reused."""

    def release(self, timeout_s: float) -> list[str]:
        """Free what the world held for the trial, once the trial's own objects are gone; return what is left.

        By default, the world holds nothing.
        """
        return []

    def describe_failure(self, error: BaseException, output: Any) -> tuple[FailureKind, str, dict[int, str]]:
        """Describe a failure of the training function; ``output`` is the rank's `OutputReader`.

        Returns:
            The kind of the failure, text to add to its traceback, and the ranks for which the function waited
            in vain, as `awaited_ranks` returns them.
        """

    def world_error(self, text: str) -> BaseException:
        """Return the error that `report` raises in a broken world; by default `WorldBroken`."""
        return WorldBroken(text)

    def awaited_ranks(self, output: Any) -> dict[int, str]:
        """Return the ranks that collectives have long waited for, with the collectives' names.

        By default none, since a collective fails if it waits for a rank that has ended.
        """
        return {}


class PlacedRank(NamedTuple):
    """A rank of the next world: its training actor, and the network interface of its collectives."""

    actor: Any
    info: WorkerInfo
    rank_info: RankInfo
    interface: str


# Opens the rendezvous of the next world; returns each rank's environment, and a function that closes the
# rendezvous, so that ranks which are still entering the world get an error, and may be called twice.
OpenRendezvous = Callable[[Sequence[PlacedRank]], tuple[list[dict[str, str]], Callable[[], None]]]
