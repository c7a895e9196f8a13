"""Patches how Tune starts the actors of trials, and which it keeps for the next trial."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

from horovod_tune.compatibility import Patch, wrap

_CONTROLLER = "ray.tune.execution.tune_controller:TuneController"
# The variable that Tune sets in the processes of every trial.
LIGHTNING_VARIABLE = {"PL_DISABLE_FORK": "1"}


@Patch(
    "the first trials start about a second later",
    "ray.tune.execution.class_cache:_ActorClassCache.get(self, trainable_cls) uses _cache",
    "ray.tune.execution.class_cache:DEFAULT_ENV_VARS",
    "ray.tune.execution.class_cache:ENV_VARS_TO_PROPAGATE",
).once
def start_in_idle_processes(is_ours: Callable[[type], bool]) -> None:
    """Start the coordinators of trials, and so their training actors, in processes that Ray keeps ready.

    Tune gives every trainable a runtime environment with a variable for Lightning, but Ray keeps processes
    ready only for the driver's environment. Our ranks set that variable themselves. If the driver has
    variables that Tune passes on (credentials), nothing is changed.
    """
    import ray
    from ray.tune.execution import class_cache

    @wrap(class_cache._ActorClassCache, "get")
    def get(original: Any, self: Any, trainable_cls: type) -> Any:
        passed_on = class_cache.ENV_VARS_TO_PROPAGATE & set(os.environ)
        known = class_cache.DEFAULT_ENV_VARS == LIGHTNING_VARIABLE
        if trainable_cls not in self._cache and is_ours(trainable_cls) and known and not passed_on:
            self._cache[trainable_cls] = ray.remote(trainable_cls)
        return original(self, trainable_cls)


@Patch(
    "each trial starts actors of its own, unless you pass reuse_actors=True",
    f"{_CONTROLLER} uses _trials _scheduler_alg _search_alg _reuse_actors "
    "_staged_trials _pending_trials _trial_to_actor _actor_cache _actor_manager _started_actors",
    f"{_CONTROLLER}._maybe_cache_trial_actor(self, trial) uses _reuse_actors _staged_trials",
    f"{_CONTROLLER}._maybe_reuse_cached_actor(self, trial) uses _trial_to_actor _actor_cache",
    f"{_CONTROLLER}._schedule_trial_pause(self, trial, should_checkpoint)",
    f"{_CONTROLLER}._cleanup_cached_actors(self, force_all) uses _actor_cache",
    "ray.air.execution._internal.actor_manager:RayActorManager uses _live_actors_to_ray_actors_resources",
    "ray.tune.utils.object_cache:_ObjectCache uses increase_max decrease_max num_cached_objects",
).once
def reuse_actors_of(is_ours: Callable[[type], bool]) -> None:
    """Make Tune keep a trainable's actors if ``is_ours(trainable)``, whatever ``reuse_actors`` is.

    Two kinds of experiments are not changed: those with ResourceChangingScheduler, for which Tune forbids
    actor reuse, and those of several trainables, since Tune distinguishes cached actors by resources only.

    When a trial ends, Tune gives its actor to a trial whose own actor is starting, and ends the starting one,
    which is kept here if another trial can use the freed one. When a trial pauses and no other is staged,
    Tune ends its actor, so that every exploit of population-based training would start new workers. Here
    actors are kept while any trial is paused or pending.
    """
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.schedulers import ResourceChangingScheduler

    # By controller: the process's next experiment may have another trainable of the same name.
    wanted: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
    pausing: set[Any] = set()

    @wrap(TuneController, "_maybe_cache_trial_actor")
    def maybe_cache(original: Any, self: Any, trial: Any) -> Any:
        if self not in wanted and {each.trainable_name for each in self._trials} == {trial.trainable_name}:
            may_reuse = not isinstance(self._scheduler_alg, ResourceChangingScheduler)
            wanted[self] = may_reuse and is_ours(trial.get_trainable_cls())
            self._reuse_actors = self._reuse_actors or wanted[self]
        if not wanted.get(self) or self._staged_trials:
            return original(self, trial)
        if trial not in pausing and not needs_actor(self):
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
        pausing.add(trial)
        try:
            original(self, trial, should_checkpoint)
        finally:
            pausing.discard(trial)

    def needs_actor(controller: Any) -> bool:
        return any(each.status in ("PAUSED", "PENDING") for each in controller._trials)

    @wrap(TuneController, "_cleanup_cached_actors")
    def cleanup(original: Any, self: Any, force_all: bool = False) -> None:
        if force_all or not (wanted.get(self) and needs_actor(self)):
            original(self, force_all)
