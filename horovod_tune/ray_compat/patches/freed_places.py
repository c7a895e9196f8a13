"""Patches how Tune waits for placement groups, so that a place which a trial leaves is taken at once."""

from __future__ import annotations

import functools
import importlib
import time
import weakref
from typing import Any

from horovod_tune.compatibility import Patch, part

_MODULE = "ray.air.execution.resources.placement_group"
_MANAGER = f"{_MODULE}:PlacementGroupResourceManager"
_PATCH = Patch(
    "freed places",
    "a trial that a scheduler resizes starts up to two seconds later",
    (
        part(f"{_MANAGER}.free_resources", "self", "acquired_resource", uses="remove_placement_group"),
        part(f"{_MANAGER}.get_resource_futures", "self", uses="_staging_future_to_pg"),
        part(f"{_MANAGER}.request_resources", "self", "resource_request", uses="_request_to_staged_pgs"),
        part(
            f"{_MANAGER}.cancel_resource_request",
            "self",
            "resource_request",
            uses="_request_to_staged_pgs _pg_to_staging_future _staging_future_to_pg _pg_to_request",
        ),
    ),
)
# How long after a place has become free it is asked for, and how often: Ray returns it some milliseconds
# after it says so.
ASKS_FOR_S = 2.0
ASKS_EVERY_S = 0.1


def take_freed_places() -> None:
    """Ask for placement groups again as soon as another one was freed; once a process.

    Ray tries a placement group that found no room again after 0.1 s, then ever later, up to 1 s, and looks
    once a second whether one is due; that resources were freed meanwhile changes nothing. A new one is tried
    at once. The trial that a scheduler resizes asks for a new one while it still holds its old one.
    """
    if not _PATCH.is_due:
        return
    import ray

    manager_class = importlib.import_module(_MODULE).PlacementGroupResourceManager
    original_free, original_futures = manager_class.free_resources, manager_class.get_resource_futures
    freed_at: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
    asks_at: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()

    @functools.wraps(original_free)
    def free(self: Any, acquired_resource: Any) -> None:
        original_free(self, acquired_resource)
        freed_at[self] = asks_at[self] = time.monotonic()

    @functools.wraps(original_futures)
    def futures(self: Any) -> list[Any]:
        if self in freed_at:
            now = time.monotonic()
            if now - freed_at[self] > ASKS_FOR_S or not self._staging_future_to_pg:
                del freed_at[self]
            elif now >= asks_at[self]:
                asks_at[self] = now + ASKS_EVERY_S
                ask_again(self)
        found: list[Any] = original_futures(self)
        return found

    def waits(group: Any) -> bool:
        """Whether Ray has found no room for it; one that is being placed must not be removed.

        Ray 2.60 loses the resources for good that a node has set aside for a group that is removed meanwhile.
        """
        return bool(ray.util.placement_group_table(group)["stats"]["scheduling_state"] == "NO_RESOURCES")

    def ask_again(manager: Any) -> None:
        """Ask anew for one placement group of each kind that waits for room."""
        for request, groups in list(manager._request_to_staged_pgs.items()):
            group = next(filter(waits, groups), None)
            if group is None:
                continue
            groups.remove(group)
            future = manager._pg_to_staging_future.pop(group)
            del manager._staging_future_to_pg[future], manager._pg_to_request[group]
            ray.cancel(future)
            ray.util.remove_placement_group(group)
            manager.request_resources(request)

    manager_class.free_resources, manager_class.get_resource_futures = free, futures
