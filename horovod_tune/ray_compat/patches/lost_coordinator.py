"""Patches the error of a trial whose coordinator actor was lost."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from horovod_tune.compatibility import Patch, part
from horovod_tune.files import directories

_PATCH = Patch(
    "lost coordinator",
    "the error of a trial whose coordinator was lost has its host's address and not its name",
    (
        part(
            "ray.tune.execution.tune_controller:TuneController._process_trial_failure",
            "self",
            "trial",
            "exception",
            uses="handle_error",
        ),
        part("ray.exceptions:RayActorError", uses="error_msg"),
        part("ray.tune.experiment.trial:Trial", uses="storage status"),
        part("ray.tune.registry:get_trainable_cls", "trainable_name"),
    ),
)


def name_lost_hosts(is_ours: Callable[[type], bool]) -> None:
    """Put the host's name into the error of a trial whose coordinator was lost; once a process.

    Nobody of the trial is left to tell then, and Ray's own text has the host's address only.
    """
    if not _PATCH.is_due:
        return
    import ray
    from ray.exceptions import RayActorError
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.registry import get_trainable_cls

    original = TuneController._process_trial_failure

    @functools.wraps(original)
    def process(self: Any, trial: Any, exception: Any) -> None:
        lost = isinstance(exception, RayActorError) and re.search(r"\bip: (\S+)", str(exception))
        if lost and is_ours(get_trainable_cls(trial.trainable_name)):
            hosts = {node["NodeManagerAddress"]: node["NodeManagerHostname"] for node in ray.nodes()}
            host = hosts.get(lost[1], lost[1])
            exception.error_msg = f"the coordinator on {host}, beside rank 0, was lost:\n{exception}"
        original(self, trial, exception)
        if lost and trial.status == "ERROR" and trial.storage.storage_filesystem.type_name == "local":
            # Killed over a checkpoint, it has left a part of one, and nobody of the trial comes any more.
            directories.remove_parts(trial.storage.trial_fs_path)

    TuneController._process_trial_failure = process  # type: ignore[method-assign]
