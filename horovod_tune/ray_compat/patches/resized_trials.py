"""Patches Tune's ResourceChangingScheduler, so that distributed trials can run with what it assigns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from horovod_tune.compatibility import Patch, wrap

_SCHEDULER = "ray.tune.schedulers:ResourceChangingScheduler"
# How long a trial's actor may take to reply to `resize`, which is called between two of its steps.
REPLY_TIMEOUT_S = 5.0


@Patch(
    "ResourceChangingScheduler needs a function that returns placement groups with an empty first bundle, "
    "and restarts elastic trials with their new size",
    f"{_SCHEDULER}.reallocate_trial_resources_if_needed(self, tune_controller, trial, result)",
    f"{_SCHEDULER}.set_trial_resources(self, trial, new_resources) uses _reallocated_trial_ids",
    f"{_SCHEDULER}.choose_trial_to_run(self, tune_controller, kwargs) uses set_trial_resources",
    "ray.tune.experiment:Trial uses temporary_state ray_actor placement_group_factory invalidate_json_state",
).once
def check_resized_trials(
    placement_of: Callable[[type, Any], Any], can_be_resized: Callable[[type], bool]
) -> None:
    """Pass every new allocation through ``placement_of(trainable, resources)``.

    ``placement_of`` raises if a trial cannot have these resources: the search then ends with that error, as
    with an error of Tune's own allocation functions.

    If ``can_be_resized(trainable)``, the trial is resized while it runs, by calling its actor's
    `resize(placement)`. If that returns False, Tune pauses and restarts the trial, like all other trials.

    If several trials pause at the same time, Tune (2.60) gives only the first its new resources, since it
    evaluates ``any_resources_changed or self.set_trial_resources(...)``. The patched method returns False.
    """
    import ray
    from ray.exceptions import RayError
    from ray.tune.schedulers import ResourceChangingScheduler

    @wrap(ResourceChangingScheduler, "reallocate_trial_resources_if_needed")
    def reallocate(original: Any, self: Any, tune_controller: Any, trial: Any, result: dict[str, Any]) -> Any:
        resources = original(self, tune_controller, trial, result)
        if not resources:
            return None
        placement = placement_of(trial.get_trainable_cls(), resources)
        if placement == trial.placement_group_factory:
            return None
        if not can_be_resized(trial.get_trainable_cls()) or not ask(trial, placement):
            return placement
        # Tune requests this if the trial must restart; `update_resources` refuses a running trial.
        trial.placement_group_factory = placement
        trial.invalidate_json_state()
        self._reallocated_trial_ids.add(trial.trial_id)
        return None

    def ask(trial: Any, placement: Any) -> bool:
        actor = trial.temporary_state.ray_actor
        try:
            return bool(ray.get(actor.resize.remote(placement), timeout=REPLY_TIMEOUT_S))
        except RayError:  # the actor hangs or was lost: Tune notices when it restarts the trial
            return False

    @wrap(ResourceChangingScheduler, "set_trial_resources")
    def set_resources(original: Any, self: Any, trial: Any, new_resources: Any) -> bool:
        original(self, trial, new_resources)
        return False
