"""Patches Tune's cache of actor classes, so that coordinators start in processes that Ray keeps ready."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from horovod_tune.ray_compat.compatibility import Patch, wrap

_PATCH = Patch(
    "idle processes",
    "the first trials start about a second later",
    "ray.tune.execution.class_cache:_ActorClassCache.get(self, trainable_cls) uses _cache",
    "ray.tune.execution.class_cache:DEFAULT_ENV_VARS",
    "ray.tune.execution.class_cache:ENV_VARS_TO_PROPAGATE",
)
# The variable that Tune sets in the processes of every trial.
LIGHTNING_VARIABLE = {"PL_DISABLE_FORK": "1"}


def start_in_idle_processes(is_ours: Callable[[type], bool]) -> None:
    """Start the coordinators of trials, and so their training actors, in processes that Ray keeps ready.

    Tune gives every trainable a runtime environment with a variable for Lightning. Ray keeps processes ready
    only for the driver's environment, so each of the first trials would start two, one after the other. Our
    ranks set that variable themselves (`LIGHTNING_VARIABLE`). If the driver has variables that Tune passes
    on (credentials), nothing is changed. Applied once per process.
    """
    if not _PATCH.is_due:
        return
    import ray
    from ray.tune.execution import class_cache

    @wrap(class_cache._ActorClassCache, "get")
    def get(original: Any, self: Any, trainable_cls: type) -> Any:
        passed_on = class_cache.ENV_VARS_TO_PROPAGATE & set(os.environ)
        known = class_cache.DEFAULT_ENV_VARS == LIGHTNING_VARIABLE
        if trainable_cls not in self._cache and is_ours(trainable_cls) and known and not passed_on:
            self._cache[trainable_cls] = ray.remote(trainable_cls)
        return original(self, trainable_cls)
