"""Whether a cluster can grow, from what each kind of autoscaler of Ray 2.60 leaves to be seen."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import ray

from horovod_tune.ray_compat.queries import cluster_can_grow


@pytest.fixture(autouse=True)
def head_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray._private.worker._global_node", SimpleNamespace(is_head=lambda: True))


def publish(monkeypatch: pytest.MonkeyPatch, status: str | None) -> None:
    def get(key: bytes, *, namespace: str | None = None) -> bytes | None:
        return None if status is None else status.encode()

    monkeypatch.setattr("ray.experimental.internal_kv._internal_kv_get", get)


@pytest.mark.parametrize(
    ("label", "published", "grows"),
    [
        ("head", None, True),  # the second version: a label on the head of `ray up`, and on KubeRay's pods
        (None, {"ray.head.default": 1}, True),  # the first version
        (None, {"node_5f1c": 1}, False),  # the monitor of a head without a cluster file
        (None, {}, False),
        (None, None, False),
        ("local.cluster.node", {"local.cluster.node": 3}, False),  # machines of one's own
    ],
)
def test_only_an_autoscaler_with_a_cluster_file_makes_a_cluster_grow(
    label: str | None, published: dict[str, int] | None, grows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = {"ray.io/node-id": "5f1c"} | ({"ray.io/node-group": label} if label else {})
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Labels": labels}])
    status = None if published is None else json.dumps({"autoscaler_report": {"active_nodes": published}})
    publish(monkeypatch, status)
    assert cluster_can_grow() is grows


def test_an_autoscaler_that_has_not_reported_yet_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Labels": {}}])
    report = json.dumps({"autoscaler_report": None})
    publish(monkeypatch, report)
    assert not cluster_can_grow()


@pytest.mark.parametrize(
    "report",
    [
        {
            "active_nodes": {"local.cluster.node": 1},
            "pending_nodes": [["10.0.0.12", "local.cluster.node", "setting-up"]],
        },
        {"active_nodes": {"local.cluster.node": 1}, "pending_launches": {"local.cluster.node": 2}},
    ],
)
def test_nodes_on_their_way_are_growth(report: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Labels": {}}])
    publish(monkeypatch, json.dumps({"autoscaler_report": report}))
    assert cluster_can_grow()


def test_a_cluster_that_another_process_started_may_grow_until_it_reports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ray._private.worker._global_node", SimpleNamespace(is_head=lambda: False))
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Labels": {}}])
    publish(monkeypatch, None)
    assert cluster_can_grow()
