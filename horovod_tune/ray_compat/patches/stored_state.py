"""Makes Tune replace a search's files in a local storage path as a whole, so that a kill leaves none cut."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from pathlib import Path
from typing import Any

from horovod_tune.compatibility import Patch, wrap

_STORAGE = "ray.train._internal.storage"


@Patch(
    "a search whose driver is killed while Tune stores its state may be lost",
    f"{_STORAGE}:_upload_to_fs_path(local_path, fs, fs_path, exclude)",
    f"{_STORAGE}:_FilesystemSyncer._sync_up_command uses _upload_to_fs_path",
    f"{_STORAGE}:StorageContext uses driver_artifacts",
).once
def replace_stored_files() -> None:
    """Copy what the driver knows of a search to temporary files, then rename them.

    Tune's own copy first empties all files of the search, results of ended trials too: several times a second
    if checkpoints are frequent and ``num_to_keep`` is set.
    """
    from pyarrow.fs import LocalFileSystem

    @wrap(importlib.import_module(_STORAGE), "_upload_to_fs_path")
    def upload(
        original: Any, local_path: str, fs: Any, fs_path: str, exclude: list[str] | None = None
    ) -> None:
        if not isinstance(fs, LocalFileSystem) or Path(local_path).name != "driver_artifacts" or exclude:
            original(local_path, fs, fs_path, exclude)
            return
        # Top-down: the state of the search comes first, before Tune can write the next one over it.
        for directory, _, names in os.walk(local_path):
            target = Path(fs_path, os.path.relpath(directory, local_path))
            target.mkdir(parents=True, exist_ok=True)
            for name in names:
                _replace(Path(directory, name), target / name)


def _replace(source: Path, target: Path) -> None:
    with contextlib.suppress(FileNotFoundError):  # Tune's own temporary file, renamed meanwhile
        if target.exists() and _version(source) == _version(target):
            return
        part = target.with_name(f".{target.name}.part")
        shutil.copy2(source, part)
        os.replace(part, target)


def _version(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_mtime_ns, status.st_size
