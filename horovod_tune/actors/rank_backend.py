"""The interfaces that Horovod's and torch.distributed's backends implement for the actors that they share.

A `RankBackend` is in each rank's process. `OpenRendezvous` is the type of a function that
is called in the coordinator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from horovod_tune.channel.report_channel import ChannelToken
from horovod_tune.messages import FailureKind, RankInfo, WorkerInfo
from horovod_tune.session.committed_state import Collectives, States
from horovod_tune.session.session import WorldBroken


class RankBackend(Protocol):
    """The backend in one rank's process. It is made, and loaded, in the template that forks the process.

    A backend must implement `close`, `abort` and `describe_failure`; the other methods have a default.
    """

    # The collectives of `commit` and `get_state`; None if the ranks cannot commit.
    collectives: Collectives | None
    # The states of the backend's own elastic API.
    states: States
    # The rank's device, as `torch.device` takes it, unless it is a GPU.
    device: str = "cpu"

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

    def describe_failure(
        self, error: BaseException, stall_report: Callable[[], str]
    ) -> tuple[FailureKind, str, dict[int, str]]:
        """Describe a failure of the training function; ``stall_report`` is `RankOutput`'s.

        Returns:
            The kind of the failure, text to add to its traceback, and the ranks for which the function waited
            in vain, with the collectives.
        """

    def world_error(self, text: str) -> BaseException:
        """Return the error that `report` raises in a broken world; by default `WorldBroken`."""
        return WorldBroken(text)

    def confirms_awaited(self) -> bool:
        """Return True if the numbers in the stall inspector's messages are those of ranks."""
        return True

    def answers(self) -> Sequence[Callable[..., Any]]:
        """Return the methods that `RankProcess.ask` may call in the process; by default none."""
        return ()


class PlacedRank(NamedTuple):
    """A rank of the next world: its training actor, and the network interface of its collectives.

    ``token`` is that of its `Assignment`.
    """

    actor: Any
    info: WorkerInfo
    rank_info: RankInfo
    interface: str
    token: ChannelToken | None


# Opens the rendezvous of the next world; returns each rank's environment, and a function that closes the
# rendezvous, so that ranks which are still entering the world get an error, and may be called twice.
OpenRendezvous = Callable[[Sequence[PlacedRank]], tuple[list[dict[str, str]], Callable[[], None]]]
