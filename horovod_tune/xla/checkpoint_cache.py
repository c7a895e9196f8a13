"""Runs in the host actor: fetches each checkpoint that the host's ranks request, once."""

from __future__ import annotations

import threading

from horovod_tune.messages import CheckpointPlace
from horovod_tune.transfer.host_copies import Copy, HostCopies, hold_copy, readable_here


class CheckpointCache:
    """The checkpoints of the current trial; others are not fetched.

    It holds the newest copy that a rank requested; the ranks hold those that they use (see `rank.py`).
    """

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._known: dict[tuple[str, str | None], CheckpointPlace] = {}
        self._copies = HostCopies()
        self._newest: Copy | None = None
        self._fetching = threading.Lock()

    @property
    def is_busy(self) -> bool:
        """True if a rank waits for a checkpoint that is being copied."""
        return self._fetching.locked()

    def add(self, place: CheckpointPlace) -> None:
        self._known[place.path, place.node_id] = place

    def forget(self) -> None:
        """Forget the checkpoints of a trial that has ended."""
        self._known, self._newest = {}, None
        self._copies.release_all()

    def fetch(self, path: str, node_id: str | None) -> str:
        """Return the checkpoint's directory on this host, copied here when the first rank requests it.

        Raises:
            LookupError: it is not a checkpoint of this trial.
        """
        place = self._known.get((path, node_id))
        if place is None:
            raise LookupError(f"{path} is not a checkpoint of this trial")
        with self._fetching:
            if readable_here(place, self._node_id):
                return place.path
            copy = hold_copy(self._copies, place)
            if self._newest is not None:
                self._newest.release()
            self._newest = copy
            return copy.path
