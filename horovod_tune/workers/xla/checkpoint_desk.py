"""The checkpoints that a host's ranks ask for, brought to the host once each. Runs in the member actor."""

from __future__ import annotations

import threading

from horovod_tune.messages import CheckpointPlace


class CheckpointDesk:
    """Knows the checkpoints of the host's trial; what is none of them is not fetched."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._known: dict[tuple[str, str | None], CheckpointPlace] = {}
        self._here: dict[tuple[str, str | None], str] = {}
        self._bringing = threading.Lock()

    @property
    def is_busy(self) -> bool:
        """Whether a rank waits for a checkpoint that is on its way."""
        return self._bringing.locked()

    def note(self, place: CheckpointPlace) -> None:
        self._known[place.path, place.node_id] = place

    def forget(self) -> None:
        """The trial is over."""
        self._known, self._here = {}, {}

    def bring(self, path: str, node_id: str | None, working_dir: str) -> str:
        """Return the checkpoint's directory on this host, brought here by whichever rank asks first.

        Raises:
            LookupError: it is none of the trial's.
        """
        place = self._known.get((path, node_id))
        if place is None:
            raise LookupError(f"{path} is no checkpoint of this trial")
        with self._bringing:
            if (path, node_id) not in self._here:
                from ray.tune import Checkpoint

                from horovod_tune.storage import open_checkpoint

                here = open_checkpoint(place, self._node_id, working_dir, Checkpoint)
                self._here[path, node_id] = here.path
            return self._here[path, node_id]
