"""The check that a cluster can grow, on what each kind of autoscaler of Ray 2.60 publishes."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from horovod_tune.ray_compat import queries
from horovod_tune.ray_compat.queries import cluster_can_grow

OWN_MACHINE = "local.cluster.node"
SETTING_UP = [["10.0.0.12", OWN_MACHINE, "setting-up"]]


@pytest.mark.parametrize(
    ("label", "report", "is_head", "grows"),
    [
        # The second version labels the head of `ray up` and KubeRay's pods; the first one publishes types.
        ("head", "none", True, True),
        (None, {"active_nodes": {"ray.head.default": 1}}, True, True),
        # The monitor of a head without a cluster file.
        (None, {"active_nodes": {"node_5f1c": 1}}, True, False),
        (None, {"active_nodes": {}}, True, False),
        (None, None, True, False),  # it has not reported yet
        (None, "none", True, False),
        (None, "none", False, True),  # another process started the cluster, and it may report later
        (OWN_MACHINE, {"active_nodes": {OWN_MACHINE: 3}}, True, False),
        (None, {"active_nodes": {OWN_MACHINE: 1}, "pending_nodes": SETTING_UP}, True, True),
        (None, {"active_nodes": {OWN_MACHINE: 1}, "pending_launches": {OWN_MACHINE: 2}}, True, True),
    ],
)
def test_only_an_autoscaler_with_a_cluster_file_makes_a_cluster_grow(
    label: str | None, report: Any, is_head: bool, grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def published(key: bytes, *, namespace: str | None = None) -> bytes | None:
        return None if report == "none" else json.dumps({"autoscaler_report": report}).encode()

    labels = {"ray.io/node-id": "5f1c"} | ({"ray.io/node-group": label} if label else {})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Labels": labels}])
    monkeypatch.setattr("ray._private.worker._global_node", SimpleNamespace(is_head=lambda: is_head))
    monkeypatch.setattr("ray.experimental.internal_kv._internal_kv_get", published)
    assert cluster_can_grow() is grows


def test_a_draining_node_has_no_free_resources_for_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"draining": {"CPU": 8.0}, "another": {"CPU": 2.0}}
    monkeypatch.setattr(queries, "draining_nodes", lambda: {"draining"})
    monkeypatch.setattr("ray._private.state.state.available_resources_per_node", lambda: free)
    assert queries.free_on_remaining_nodes() == {"another": {"CPU": 2.0}}
