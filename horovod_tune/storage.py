"""Runs in the coordinator: brings rank 0's checkpoints and every rank's log to the trial's storage, and back.

Tune's storage may be a cloud URI or a shared file system, which every host reaches, or the local disk of the
driver's machine, which only that machine does. In the last case files go there through `transfer`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod_tune import ray_adapter
from horovod_tune.messages import CheckpointPlace

if TYPE_CHECKING:
    from ray.tune import Checkpoint

TRANSFER_TIMEOUT_S = 6 * 3600.0
"""An end for a copy between hosts that share no file system, far above what a checkpoint takes."""
LOG_BYTES = 16 << 20
"""How much of one rank's output a trial keeps."""


class TrialStorage:
    """One trial's storage, as seen from the coordinator's host.

    Args:
        context: Tune's ``StorageContext`` of the trial.
        node_id: the Ray node that the coordinator runs on.
    """

    def __init__(self, context: Any, node_id: str) -> None:
        self._context = context
        self._node_id = node_id
        self._log_bytes: dict[int, int] = {}

    @property
    def is_local(self) -> bool:
        """Whether the storage is a path on somebody's disk, shared or not."""
        return self._context.storage_filesystem.type_name == "local"

    @cached_property
    def reached_through(self) -> str | None:
        """The node that writes to the storage for us, None where this host reaches it itself."""
        if not self.is_local:
            return None
        driver = ray_adapter.driver_node_id()
        if driver is None or driver == self._node_id:
            return None
        from horovod_tune import transfer

        path = self._context.experiment_fs_path
        here = transfer.fingerprint(path)
        if here is not None and ray_adapter.storage_reaches_here(self._context):
            # A namesake left on this host's own disk by an earlier experiment is not the driver's.
            there = transfer.stat_directory(driver, path, timeout_s=60)
            if here == there:
                return None
        return driver

    def persist(self, directory: str, metrics: dict[str, Any]) -> tuple[Checkpoint, CheckpointPlace]:
        """Copy a checkpoint directory of this host to the trial's storage."""
        from ray.tune import Checkpoint

        self._context._update_checkpoint_index(metrics)
        target = self._context.checkpoint_fs_path
        if self.reached_through is None:
            self._copy_here(directory, target)
        else:
            from horovod_tune import transfer

            transfer.copy_directory(
                self._node_id, directory, self.reached_through, target, timeout_s=TRANSFER_TIMEOUT_S
            )
        checkpoint = Checkpoint(path=target, filesystem=self._context.storage_filesystem)
        metrics["checkpoint_dir_name"] = self._context.checkpoint_dir_name
        return checkpoint, self.place(checkpoint)

    def _copy_here(self, directory: str, target: str) -> None:
        if not self.is_local:
            from ray.tune import Checkpoint

            self._context.persist_current_checkpoint(Checkpoint.from_directory(directory))
            return
        # Written beside and renamed, so that a checkpoint is whole or not there when a machine goes down.
        part = f"{target}.part"
        shutil.rmtree(part, ignore_errors=True)
        shutil.copytree(directory, part)
        if os.path.isdir(target):
            shutil.rmtree(target)
        os.rename(part, target)

    def place(self, checkpoint: Checkpoint) -> CheckpointPlace:
        """Return where ranks find a checkpoint that this host, or the driver's, can read."""
        if getattr(checkpoint.filesystem, "type_name", "local") != "local":
            return CheckpointPlace(checkpoint.path, filesystem=checkpoint.filesystem)
        node = self.reached_through or self._node_id
        return CheckpointPlace(checkpoint.path, node_id=node)

    def bring_here(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint in a form that this host can open."""
        from ray.tune import Checkpoint as TuneCheckpoint

        place = self.place(checkpoint)
        return open_checkpoint(place, self._node_id, self._context.trial_working_directory, TuneCheckpoint)

    def place_here(self, checkpoint: Checkpoint) -> CheckpointPlace:
        """Return where ranks find a checkpoint that this host can read."""
        if getattr(checkpoint.filesystem, "type_name", "local") != "local":
            return CheckpointPlace(checkpoint.path, filesystem=checkpoint.filesystem)
        return CheckpointPlace(checkpoint.path, node_id=self._node_id)

    def append_log(self, rank: int, text: bytes) -> None:
        """Append to the rank's log file, up to LOG_BYTES."""
        written = self._log_bytes.get(rank, 0)
        if written >= LOG_BYTES:
            return
        room = LOG_BYTES - written
        if len(text) > room:
            text = text[:room] + b"\n[horovod_tune: the log of this rank ends here, it is too long]\n"
        self._log_bytes[rank] = written + len(text)
        directory = self._log_directory
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / f"rank_{rank}.log").open("ab") as file:
            file.write(text)

    @property
    def _log_directory(self) -> Path:
        if self.is_local and self.reached_through is None:
            return Path(self._context.trial_fs_path)
        return Path(self._context.trial_working_directory, "rank_logs")

    def publish_logs(self) -> None:
        """Bring the logs to the storage where they were not written there in the first place."""
        directory = self._log_directory
        if not self._log_bytes or directory == Path(self._context.trial_fs_path):
            return
        target = self._context.trial_fs_path
        if self.reached_through is not None:
            from horovod_tune import transfer

            transfer.copy_directory(
                self._node_id, str(directory), self.reached_through, target, timeout_s=TRANSFER_TIMEOUT_S
            )
            return
        import pyarrow.fs

        pyarrow.fs.copy_files(str(directory), target, destination_filesystem=self._context.storage_filesystem)


def open_checkpoint(place: CheckpointPlace, node_id: str, scratch: str, checkpoint_class: type) -> Any:
    """Return ``place`` as a checkpoint that a process on ``node_id`` can read.

    A checkpoint on another node's own disk is copied to a new directory below ``scratch`` first.
    """
    if place.filesystem is not None:
        return checkpoint_class(path=place.path, filesystem=place.filesystem)
    if place.node_id in (None, node_id):
        return checkpoint_class.from_directory(place.path)  # type: ignore[attr-defined]
    from horovod_tune import transfer

    assert place.node_id is not None
    here = transfer.fingerprint(place.path)
    if here is not None and here == transfer.stat_directory(place.node_id, place.path, timeout_s=60):
        return checkpoint_class.from_directory(place.path)  # type: ignore[attr-defined]
    os.makedirs(scratch, exist_ok=True)
    copy = tempfile.mkdtemp(prefix="checkpoint_", dir=scratch)
    transfer.copy_directory(place.node_id, place.path, node_id, copy, timeout_s=TRANSFER_TIMEOUT_S)
    return checkpoint_class.from_directory(copy)  # type: ignore[attr-defined]
