"""Patches how often Tune counts the failure of a trial whose coordinator died."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from horovod_tune.ray_compat.compatibility import Patch, part, wrap

_CONTROLLER = "ray.tune.execution.tune_controller:TuneController"
_PATCH = Patch(
    "failure count",
    "the death of a kept coordinator may count as two failures of its trial",
    (
        part(_CONTROLLER, uses="_resetting_trials"),
        part(f"{_CONTROLLER}._trial_task_failure(self, trial, exception)"),
        part("ray.tune.registry:get_trainable_cls(trainable_name)"),
    ),
)


def count_each_death_once(is_ours: Callable[[type], bool]) -> None:
    """Count the death of a coordinator that takes its next trial as one failure; once per process.

    Tune is notified of it twice, by the actor's death and by the failed call that should have reset it,
    counts both, and abandons the trial at the second, whatever ``max_failures`` is.
    """
    if not _PATCH.is_due:
        return
    from ray.exceptions import RayActorError
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.registry import get_trainable_cls

    counted: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @wrap(TuneController, "_trial_task_failure")
    def fail(original: Any, self: Any, trial: Any, exception: Exception) -> None:
        if isinstance(exception, RayActorError) and is_ours(get_trainable_cls(trial.trainable_name)):
            # An actor that is gone has nothing to reset: the trial's next one starts as any other.
            self._resetting_trials.discard(trial)
            if counted.get(trial) is exception:
                return
            counted[trial] = exception
        original(self, trial, exception)
