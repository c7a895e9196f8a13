"""Tune's class for what a trainable's `save` must return. The import also checks the trial's storage."""

from __future__ import annotations

import ray

from horovod_tune.compatibility import difference
from horovod_tune.errors import UnsupportedRay

_REQUIRED = (
    "ray.train._internal.checkpoint_manager:_TrainingResult(checkpoint, metrics)",
    "ray.tune.trainable:Trainable uses _storage",
    "ray.train._internal.storage:StorageContext uses "
    "storage_filesystem experiment_dir_name experiment_fs_path trial_fs_path "
    "sync_config trial_driver_staging_path trial_working_directory checkpoint_fs_path "
    "checkpoint_dir_name current_checkpoint_index persist_current_checkpoint persist_artifacts",
)
if differences := list(filter(None, map(difference, _REQUIRED))):
    raise UnsupportedRay(
        f"Tune's results or storage in Ray {ray.__version__} differ from what horovod_tune requires "
        f"({'; '.join(differences)}). Install a release that the README lists, or a newer horovod_tune."
    )

from ray.train._internal.checkpoint_manager import _TrainingResult as TrainingResult  # noqa: E402

__all__ = ["TrainingResult"]
