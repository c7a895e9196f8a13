"""Patches Tune's controller: when a trial ends or pauses, its actor is kept for the next trial."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from horovod_tune.ray_compat.compatibility import Patch, wrap

_CONTROLLER = "ray.tune.execution.tune_controller:TuneController"
_PATCH = Patch(
    "actor reuse",
    "each trial starts workers of its own, unless you pass reuse_actors=True",
    f"{_CONTROLLER} uses _trials _scheduler_alg _search_alg _reuse_actors "
    "_staged_trials _pending_trials _trial_to_actor _actor_cache _actor_manager _started_actors",
    f"{_CONTROLLER}._maybe_cache_trial_actor(self, trial) uses _reuse_actors _staged_trials",
    f"{_CONTROLLER}._maybe_reuse_cached_actor(self, trial) uses _trial_to_actor _actor_cache",
    f"{_CONTROLLER}._schedule_trial_pause(self, trial, should_checkpoint)",
    f"{_CONTROLLER}._cleanup_cached_actors(self, force_all) uses _actor_cache",
    "ray.air.execution._internal.actor_manager:RayActorManager uses _live_actors_to_ray_actors_resources",
    "ray.tune.utils.object_cache:_ObjectCache.increase_max(self, key, by)",
    "ray.tune.utils.object_cache:_ObjectCache.decrease_max(self, key, by)",
    "ray.tune.utils.object_cache:_ObjectCache.num_cached_objects",
    "ray.tune.registry:get_trainable_cls(trainable_name)",
)


def reuse_actors_of(keeps_actors: Callable[[type], bool]) -> None:
    """Make Tune keep a trainable's actors if ``keeps_actors(trainable)``, whatever ``reuse_actors`` is.

    Only the first call in a process has an effect.

    Two kinds of experiments are not changed: those with ResourceChangingScheduler, for which Tune forbids
    actor reuse, and those of several trainables, since Tune distinguishes cached actors by resources only.

    When a trial ends, Tune gives its actor to a trial whose own actor is starting, and ends the starting one.
    The next trial must then start an actor again. With this patch, the starting actor is kept if another
    trial can use the freed one.

    When a trial pauses and no other trial is staged, Tune also ends its actor, though the trial continues
    later: with population-based training, every exploit would start new workers. Our actors are kept while
    any trial is paused or pending.
    """
    if not _PATCH.is_due:
        return
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.registry import get_trainable_cls

    # By controller: the process's next experiment may have another trainable of the same name.
    wanted: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
    pausing: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @wrap(TuneController, "_maybe_cache_trial_actor")
    def maybe_cache(original: Any, self: Any, trial: Any) -> Any:
        if self not in wanted and {each.trainable_name for each in self._trials} == {trial.trainable_name}:
            wanted[self] = keeps_actors(get_trainable_cls(trial.trainable_name))
            if wanted[self] and type(self._scheduler_alg).__name__ != "ResourceChangingScheduler":
                self._reuse_actors = True
        if not (wanted.get(self) and self._reuse_actors) or self._staged_trials:
            return original(self, trial)
        if not (pausing.get(self) is trial or needs_actor(self)):
            return original(self, trial)
        # Tune keeps at most one actor per staged trial: stage this one, and make room for its actor.
        self._staged_trials.add(trial)
        resources, room = trial.placement_group_factory, self._actor_cache.num_cached_objects + 1
        self._actor_cache.increase_max(resources, room)
        try:
            return original(self, trial)
        finally:
            self._actor_cache.decrease_max(resources, room)
            self._staged_trials.discard(trial)

    @wrap(TuneController, "_maybe_reuse_cached_actor")
    def maybe_reuse(original: Any, self: Any, trial: Any) -> Any:
        own = self._trial_to_actor.get(trial)
        if wanted.get(self) and own is not None and is_starting(self, own) and is_needed_elsewhere(self):
            return False
        return original(self, trial)

    def is_starting(controller: Any, actor: Any) -> bool:
        live = controller._actor_manager._live_actors_to_ray_actors_resources
        return actor in live and actor not in controller._started_actors

    def is_needed_elsewhere(controller: Any) -> bool:
        return not controller._search_alg.is_finished() or any(
            own is None or not is_starting(controller, own)
            for own in map(controller._trial_to_actor.get, controller._pending_trials)
        )

    @wrap(TuneController, "_schedule_trial_pause")
    def pause(original: Any, self: Any, trial: Any, should_checkpoint: bool = True) -> None:
        pausing[self] = trial
        try:
            original(self, trial, should_checkpoint)
        finally:
            pausing.pop(self, None)

    def needs_actor(controller: Any) -> bool:
        return any(each.status in ("PAUSED", "PENDING") for each in controller._trials)

    @wrap(TuneController, "_cleanup_cached_actors")
    def cleanup(original: Any, self: Any, force_all: bool = False) -> None:
        ours = self._reuse_actors and wanted.get(self)
        if force_all or not (ours and needs_actor(self)):
            original(self, force_all)
