"""Keeps compiled wheels under the user's cache directory, so that a new checkout does not compile again."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from horovod_tune.horovod_build import BuildError

# How long a build waits for another build of the same wheel. A build takes minutes.
LOCK_TIMEOUT_S = 1800.0


def default_cache(environ: Mapping[str, str]) -> Path:
    """Return the cache directory: ``$XDG_CACHE_HOME/horovod_tune``, or ``~/.cache/horovod_tune``."""
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is invalid and is to be ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "horovod_tune"


class WheelCache:
    """The kept wheels, one folder for each build's key."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.logs = root / "logs"

    def find(self, key: str) -> Path | None:
        """Return the kept wheel of the build `key`, or None."""
        wheels = sorted((self.root / "wheels" / key).glob("horovod-*.whl"))
        return wheels[-1] if wheels else None

    def keep(self, key: str, wheel: Path) -> Path:
        """Put `wheel` under `key`; it appears there whole or not at all."""
        folder = self.root / "wheels" / key
        folder.mkdir(parents=True, exist_ok=True)
        kept = folder / wheel.name
        coming = folder / f".{wheel.name}.{os.getpid()}.part"
        try:
            shutil.copyfile(wheel, coming)
            os.replace(coming, kept)
        finally:
            coming.unlink(missing_ok=True)
        return kept

    def work_folder(self, key: str) -> Path:
        """Return an empty folder to build `key` in; for the holder of its lock alone.

        What an interrupted build left there is removed first.
        """
        folder = self.root / "building" / key
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        return folder

    @contextmanager
    def lock(self, key: str, *, timeout_s: float = LOCK_TIMEOUT_S, poll_s: float = 0.2) -> Iterator[int]:
        """Hold the lock of the build `key`, and give its file descriptor.

        The kernel drops the lock with its last holder, however that one ends: no lock outlives a build.
        A compiler that is handed the descriptor holds the lock for as long as it runs.

        Raises:
            BuildError: another process holds it for longer than `timeout_s`; names that process.
        """
        folder = self.root / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{key}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._wait_for(descriptor, path, timeout_s, poll_s)
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
            yield descriptor
        finally:
            os.close(descriptor)

    @staticmethod
    def _wait_for(descriptor: int, path: Path, timeout_s: float, poll_s: float) -> None:
        ends_s = time.monotonic() + timeout_s
        said = False
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
            if time.monotonic() >= ends_s:
                raise BuildError(
                    f"Process {holder} has been building the same wheel for more than {timeout_s:.0f} s "
                    f"(it holds {path}). Wait for it, or end it and run this again."
                )
            if not said:
                print(f"Process {holder} is building the same wheel; waiting for it.", flush=True)
                said = True
            time.sleep(poll_s)
