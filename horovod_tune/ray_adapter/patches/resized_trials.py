"""Patches Tune's ResourceChangingScheduler, so that it gives distributed trials what they can run with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from horovod_tune.private_parts import Patch, part

_SCHEDULER = "ray.tune.schedulers:ResourceChangingScheduler"
_PATCH = Patch(
    "resized trials",
    "ResourceChangingScheduler needs a function that returns placement groups with an empty first bundle",
    (
        part(
            f"{_SCHEDULER}.reallocate_trial_resources_if_needed", "self", "tune_controller", "trial", "result"
        ),
        part(f"{_SCHEDULER}.set_trial_resources", "self", "trial", "new_resources"),
        part(
            f"{_SCHEDULER}.choose_trial_to_run",
            "self",
            "tune_controller",
            "kwargs",
            uses="set_trial_resources",
        ),
        part("ray.tune.experiment:Trial.get_trainable_cls", "self"),
    ),
)


def check_resized_trials(placement_of: Callable[[type, Any], Any]) -> None:
    """Let every new allocation be what ``placement_of(trainable, resources)`` makes of it; once a process.

    ``placement_of`` raises where a trial cannot have these resources: the search then ends with that error,
    as with those of Tune's own allocation functions.

    Of several trials that pause at the same time, Tune (2.60) gives only the first its new resources:
    ``any_resources_changed or self.set_trial_resources(...)`` is not evaluated for the others.
    """
    if not _PATCH.is_due:
        return
    from ray.tune.schedulers import ResourceChangingScheduler

    original = ResourceChangingScheduler.reallocate_trial_resources_if_needed

    @functools.wraps(original)
    def reallocate(self: Any, tune_controller: Any, trial: Any, result: dict[str, Any]) -> Any:
        resources = original(self, tune_controller, trial, result)
        if not resources:
            return None
        placement = placement_of(trial.get_trainable_cls(), resources)
        return None if placement == trial.placement_group_factory else placement

    original_set = ResourceChangingScheduler.set_trial_resources

    @functools.wraps(original_set)
    def set_resources(self: Any, trial: Any, new_resources: Any) -> bool:
        original_set(self, trial, new_resources)
        return False

    ResourceChangingScheduler.reallocate_trial_resources_if_needed = reallocate  # type: ignore[method-assign]
    ResourceChangingScheduler.set_trial_resources = set_resources  # type: ignore[method-assign]
