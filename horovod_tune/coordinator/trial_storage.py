"""Runs in the coordinator: writes checkpoints and rank logs to the trial's storage, and reads them.

Tune's storage may be a cloud URI or a shared file system, which every host can reach, or the local disk of
the driver's host. In the last case, files are sent to the driver's host through `transfer`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod_tune.errors import MetricsError
from horovod_tune.files import directories, log_files
from horovod_tune.messages import CheckpointPlace
from horovod_tune.ray_compat import queries
from horovod_tune.transfer import node_transfer
from horovod_tune.transfer.host_copies import (
    PROBE_TIMEOUT_S,
    TRANSFER_TIMEOUT_S,
    HostCopies,
    open_checkpoint,
)

if TYPE_CHECKING:
    from ray.tune import Checkpoint

# Short, since the trial waits while a log is stored.
LOG_TIMEOUT_S = 30.0


class TrialStorage:
    """One trial's storage, a ``StorageContext`` of Tune, as seen from the coordinator on ``node_id``."""

    def __init__(self, context: Any, node_id: str) -> None:
        self._context = context
        self._node_id = node_id
        self._copies = HostCopies()
        self._brought: Checkpoint | None = None
        self._has_removed_parts = False
        # By rank: output that is not in the storage yet, and the number of bytes that are in it.
        self._new_output: dict[int, bytes] = {}
        self._stored_bytes: Counter[int] = Counter()

    @property
    def is_local(self) -> bool:
        """True if the storage is a path on a disk, shared or not."""
        return self._context.storage_filesystem.type_name == "local"

    @cached_property
    def reached_through(self) -> str | None:
        """The node that writes to the storage for this host; None if this host can write to it."""
        if not self.is_local:
            return None
        driver = queries.driver_node_id()
        if driver is None or driver == self._node_id:
            return None
        path = self._context.experiment_fs_path
        here = directories.fingerprint(path)
        if here is None:
            return driver
        # This host's own disk may have a directory of this name too, from an earlier experiment.
        there = node_transfer.call_on(driver, directories.fingerprint, path, timeout_s=PROBE_TIMEOUT_S)
        return None if here == there else driver

    def _call(self, function: Callable[..., object], *arguments: Any, timeout_s: float) -> None:
        """Call a function on the host that writes to the storage."""
        if self.reached_through is None:
            function(*arguments)
        else:
            node_transfer.call_on(self.reached_through, function, *arguments, timeout_s=timeout_s)

    def persist(
        self, directory: str, metrics: dict[str, Any], *, node_id: str | None = None
    ) -> tuple[Checkpoint, CheckpointPlace]:
        """Copy a checkpoint directory to the trial's storage; add its name to ``metrics``.

        The directory is on the node ``node_id``, by default this one: an elastic trial that has lost the
        ranks on this host has its rank 0 on another.
        """
        from ray.tune import Checkpoint

        there = open_checkpoint(CheckpointPlace(directory, node_id=node_id), self._node_id, self._copies)
        self._remove_parts()
        self._context.current_checkpoint_index += 1
        metrics["checkpoint_dir_name"] = self._context.checkpoint_dir_name
        target = self._context.checkpoint_fs_path
        self._send(there.path, target)
        checkpoint = Checkpoint(path=target, filesystem=self._context.storage_filesystem)
        return checkpoint, self.place(checkpoint)

    def _send(self, directory: str, target: str) -> None:
        if self.reached_through is not None:
            node_transfer.send_directory(
                directory, self.reached_through, target, timeout_s=TRANSFER_TIMEOUT_S
            )
        elif self.is_local:
            # `copy` renames the copy when it is complete, so that a power loss leaves no partial checkpoint.
            directories.copy(directory, target)
        else:
            from ray.tune import Checkpoint

            # Ray's own error does not name the link.
            if links := [each.path for each in directories.entries(directory) if each.link]:
                raise MetricsError(
                    f"the checkpoint {directory} contains {links[0]!r}, a broken symbolic link, but the "
                    "trial's storage can hold only files and directories"
                )
            self._context.persist_current_checkpoint(Checkpoint.from_directory(directory))

    def _remove_parts(self) -> None:
        """Delete, once, the partial checkpoints of an earlier attempt that was killed."""
        if self.is_local and not self._has_removed_parts:
            self._has_removed_parts = True
            self._call(directories.remove_parts, self._context.trial_fs_path, timeout_s=PROBE_TIMEOUT_S)

    def place(self, checkpoint: Checkpoint) -> CheckpointPlace:
        """Return where ranks find a checkpoint that this host or the driver's can read."""
        if getattr(checkpoint.filesystem, "type_name", "local") != "local":
            return CheckpointPlace(checkpoint.path, filesystem=checkpoint.filesystem)
        node = self.reached_through or self._node_id
        return CheckpointPlace(checkpoint.path, node_id=node)

    def fetch(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint as a directory on this host; a copy is kept until `close`."""
        self._remove_parts()
        self._brought = open_checkpoint(self.place(checkpoint), self._node_id, self._copies)
        return self._brought

    def append_log(self, rank: int, text: bytes) -> None:
        """Append output to a rank's log, at the next `publish_logs` if this host cannot do it directly."""
        if self.is_local and self.reached_through is None:
            self._store_log(rank, text)
            return
        self._new_output[rank] = log_files.shorten(
            self._new_output.get(rank, b"") + text, log_files.LOG_BYTES // 2
        )
        if sum(map(len, self._new_output.values())) > log_files.LOG_BYTES:
            self.publish_logs(at_end=True)

    def publish_logs(self, *, at_end: bool = False) -> None:
        """Store new output.

        A cloud accepts only whole files, so until the trial ends (``at_end``), a log is written there only
        when it has grown by a quarter.
        """
        for rank, text in list(self._new_output.items()):
            if self.is_local or at_end or len(text) >= self._stored_bytes[rank] / 4:
                # Deleted before it is stored: output that cannot be stored must not be tried again.
                del self._new_output[rank]
                self._stored_bytes[rank] += len(text)
                self._store_log(rank, text)

    def _store_log(self, rank: int, text: bytes) -> None:
        path = f"{self._context.trial_fs_path}/rank_{rank}.log"
        if self.is_local:
            self._call(log_files.append, Path(path), text, timeout_s=LOG_TIMEOUT_S)
            return
        filesystem = self._context.storage_filesystem
        if filesystem.get_file_info(path).is_file:
            with filesystem.open_input_stream(path) as stream:
                text = stream.read() + text
        filesystem.create_dir(self._context.trial_fs_path)
        with filesystem.open_output_stream(path) as stream:
            stream.write(log_files.shorten(text, log_files.LOG_BYTES))

    def close(self) -> None:
        """Release the copies of checkpoints on this host."""
        self._copies.release_all()
