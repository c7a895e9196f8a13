"""Copies of checkpoints on a host that cannot read the originals; its processes share each copy.

A process holds a copy through a shared lock on a file next to it. The kernel releases the lock however the
process ends. The last holder deletes the copy; orphans are deleted by the next `hold()`.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from horovod_tune.files.directories import fingerprint
from horovod_tune.messages import CheckpointPlace
from horovod_tune.ray_compat import queries
from horovod_tune.transfer import node_transfer

# A limit for a copy between hosts without a shared file system, far above what a checkpoint takes.
TRANSFER_TIMEOUT_S = 6 * 3600.0
PROBE_TIMEOUT_S = 60.0


class Copy:
    """A directory that this process holds until `release`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = str(path)
        self._lock, self._pid = lock, os.getpid()

    def release(self) -> None:
        """Release the directory, and delete it if no other process holds it; may be called twice."""
        # A fork has the same lock as its parent, which continues to hold it.
        if self._lock < 0 or os.getpid() != self._pid:
            return
        lock, self._lock = self._lock, -1
        with contextlib.suppress(FileNotFoundError):  # Ray has removed the session's directory
            _remove_if_free(Path(self.path), lock)
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)


class HostCopies:
    """One process's access to the copies in a folder of this host."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._held: list[Copy] = []

    @property
    def folder(self) -> Path:
        if self._folder is None:
            private = queries.private_directory()
            # Without one, each process has copies of its own.
            self._folder = private / "checkpoints" if private else Path(tempfile.mkdtemp("_checkpoints"))
        return self._folder

    def hold(self, name: str, bring: Callable[[str], object]) -> Copy:
        """Hold and return the copy ``name``; ``bring(path)`` makes it if this host has none.

        A call waits while another process fetches the copy.
        """
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self.remove_orphans()
        while True:
            lock = os.open(_lock_of(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.ExitStack() as undo:
                undo.callback(os.close, lock)
                if _is_free(lock) and _is_current(path, lock) and not path.is_dir():
                    bring(str(path))
                # Wait while another process fetches. The copy may be deleted meanwhile: check again.
                fcntl.flock(lock, fcntl.LOCK_SH)
                if _is_current(path, lock) and path.is_dir():
                    undo.pop_all()
                    copy = Copy(path, lock)
                    self._held.append(copy)
                    return copy

    def release_all(self) -> None:
        """Release all copies of this process: its trial has ended."""
        held, self._held = self._held, []
        for copy in held:
            copy.release()

    def remove_orphans(self) -> None:
        """Remove copies whose last holder was killed, and partial copies."""
        for found in self.folder.glob("*.lock"):
            with contextlib.suppress(FileNotFoundError):
                lock = os.open(found, os.O_RDWR | os.O_CLOEXEC)
                _remove_if_free(found.with_suffix(""), lock)
                os.close(lock)


def _lock_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _is_current(path: Path, lock: int) -> bool:
    """Return True if the lock is still the copy's: the process that deletes a copy deletes its lock."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(lock), os.stat(_lock_of(path)))
    return False


def _is_free(lock: int) -> bool:
    """Take the exclusive lock and return True, unless another process holds or fetches the copy.

    Linux drops a shared lock even if it cannot make it exclusive: of several processes that release a copy at
    the same time, the last one finds it free.
    """
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _remove_if_free(path: Path, lock: int) -> None:
    if _is_free(lock) and _is_current(path, lock):
        for each in (path, *path.parent.glob(f"{path.name}.*.part")):
            shutil.rmtree(each, ignore_errors=True)
        os.unlink(_lock_of(path))


def ask_node(place: CheckpointPlace, target: str | None = None) -> tuple[int, int] | None:
    """Copy a checkpoint from its node to ``target``; without a target, return its `fingerprint` there."""
    node = str(place.node_id)
    if target is None:
        return node_transfer.call_on(node, fingerprint, place.path, timeout_s=PROBE_TIMEOUT_S)
    node_transfer.fetch_directory(node, place.path, target, timeout_s=TRANSFER_TIMEOUT_S)
    return None


def open_checkpoint(
    place: CheckpointPlace,
    node_id: str,
    copies: HostCopies,
    *,
    ask: Callable[..., tuple[int, int] | None] = ask_node,
) -> Any:
    """Return ``place`` as a ``ray.tune.Checkpoint`` that a process on ``node_id`` can read.

    A checkpoint on another node's own disk is copied to this host, unless this host already has a copy. The
    copy is held until the returned object is deleted, or until ``copies.release_all()``.
    """
    from ray.tune import Checkpoint

    if place.filesystem is not None:
        return Checkpoint(path=place.path, filesystem=place.filesystem)
    if place.node_id in (None, node_id):
        return Checkpoint.from_directory(place.path)
    original = ask(place)
    if original is not None and original == fingerprint(place.path):  # a shared file system
        return Checkpoint.from_directory(place.path)
    # A restarted trial may write another checkpoint to the same path.
    name = hashlib.sha256(repr((place.node_id, place.path, original)).encode()).hexdigest()[:20]
    copy = copies.hold(name, functools.partial(ask, place))
    checkpoint = Checkpoint.from_directory(copy.path)
    weakref.finalize(checkpoint, copy.release).atexit = False
    return checkpoint
