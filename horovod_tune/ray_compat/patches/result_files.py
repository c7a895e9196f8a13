"""Patches how Tune's loggers fetch a restarted trial's result file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from horovod_tune.ray_compat.compatibility import Patch, part, wrap

_PATCH = Patch(
    "result files",
    "a trial that starts again may lose results of its first attempt that were not yet copied to the storage",
    (
        part(
            "ray.tune.logger:LoggerCallback._restore_from_remote(self, file_name, trial)",
            uses="local_path storage trial_fs_path storage_filesystem",
        ),
    ),
)


def keep_longer_results() -> None:
    """Stop Tune from replacing a restarted trial's results with an older copy; once per process.

    When a trial starts again, Tune's loggers fetch its result file from the storage over the local one. In
    the driver that wrote it, the copy in the storage is behind by what was not synced yet (or as long), so
    results of the trial's first attempt would be lost.
    """
    if not _PATCH.is_due:
        return
    from ray.tune.logger import LoggerCallback

    @wrap(LoggerCallback, "_restore_from_remote")
    def restore(original: Any, self: Any, file_name: str, trial: Any) -> None:
        local = Path(trial.local_path, file_name)
        path = Path(trial.storage.trial_fs_path, file_name).as_posix()
        stored = trial.storage.storage_filesystem.get_file_info(path)
        if not local.exists() or local.stat().st_size < (stored.size or 0):
            original(self, file_name, trial)
