"""A placement group that waits is asked for again as soon as another one is freed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from ray.air.execution.resources.placement_group import PlacementGroupResourceManager
from ray.air.execution.resources.request import ResourceRequest
from ray.util.placement_group import placement_group_table
from sessions import local_ray

from horovod_tune import ray_compat

WITHIN_S = 60.0


@pytest.fixture(scope="module")
def ray_session() -> Iterator[Any]:
    """A Ray of its own: the tests look at all of its placement groups."""
    with local_ray(num_cpus=4) as session:
        yield session


def until_ready(manager: Any, request: ResourceRequest) -> None:
    """Do what Tune does until there is room for ``request``."""
    end = time.monotonic() + WITHIN_S
    while not manager.has_resources_ready(request):
        assert time.monotonic() < end
        ray.wait(manager.get_resource_futures(), timeout=0.1)


def states() -> list[str]:
    return sorted(each["state"] for each in placement_group_table().values())


def until_ray_has_tried(group: Any) -> None:
    end = time.monotonic() + WITHIN_S
    while placement_group_table(group)["stats"]["scheduling_state"] != "NO_RESOURCES":
        assert time.monotonic() < end
        time.sleep(0.01)


def held(manager: Any, request: ResourceRequest) -> Any:
    manager.request_resources(request)
    until_ready(manager, request)
    return manager.acquire_resources(request)


def test_what_waits_is_asked_for_again_and_nothing_is_left(ray_session: Any) -> None:
    ray_compat.take_freed_places()
    manager = PlacementGroupResourceManager()
    small, medium, large = [ResourceRequest([{}, {"CPU": cpus}]) for cpus in (1, 2, 4)]
    first_to_go, next_to_go = held(manager, small), held(manager, medium)
    manager.request_resources(large)
    (asked,) = manager._request_to_staged_pgs[large]
    manager.get_resource_futures()
    assert manager._request_to_staged_pgs[large] == {asked}, "nothing was freed yet"
    until_ray_has_tried(asked)
    manager.free_resources(first_to_go)  # which is not enough
    manager.get_resource_futures()
    (again,) = manager._request_to_staged_pgs[large]
    assert again != asked
    manager.free_resources(next_to_go)
    until_ready(manager, large)
    taken = manager.acquire_resources(large)
    assert [states().count(state) for state in ("CREATED", "PENDING")] == [1, 0]
    manager.free_resources(taken)
    assert set(states()) == {"REMOVED"}


def test_what_is_being_placed_is_left_alone(ray_session: Any) -> None:
    """Ray loses the resources of a group that is removed while a node sets them aside for it."""
    ray_compat.take_freed_places()
    manager = PlacementGroupResourceManager()
    small = ResourceRequest([{}, {"CPU": 1}])
    for _ in range(20):
        freed = held(manager, small)
        manager.free_resources(freed)
        manager.request_resources(small)
        (asked,) = manager._request_to_staged_pgs[small]
        manager.get_resource_futures()
        assert manager._request_to_staged_pgs[small] == {asked}
        until_ready(manager, small)
        manager.free_resources(manager.acquire_resources(small))
