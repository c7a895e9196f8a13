"""The assignments that the launcher gives its ranks, from their workers' infos, without Ray."""

from __future__ import annotations

import os
import threading
from typing import Any
from unittest.mock import Mock

import pytest
import ray

from horovod_tune.actors.actor_launcher import ActorLauncher
from horovod_tune.actors.training_actor import TrainingActor
from horovod_tune.backends.horovod import horovod_backend
from horovod_tune.messages import Assignment, RankInfo, RankRejoin, WorkerInfo
from horovod_tune.rank import process
from horovod_tune.spec.trial_spec import make_spec
from horovod_tune.tpu import reservation
from horovod_tune.tpu.slices import TpuHost

INTERFACES = {"lo": ("127.0.0.1",), "eth0": ("10.0.0.5",), "ib0": ("10.9.0.5",)}


@pytest.fixture
def assign() -> Any:
    """Return rank 0's assignment in a world of two ranks on one host, by default the coordinator's."""
    launchers = []

    def assign(node: str = "a", **settings: Any) -> Assignment:
        launchers.append(
            horovod_backend.launcher(make_spec(**{"num_slots": 2, **settings}), None, node_id="a")
        )  # type: ignore[arg-type]
        facts = [
            WorkerInfo(node, "10.0.0.5", "host", 7 + each, 0.0, (str(each),), interfaces=INTERFACES)
            for each in (0, 1)
        ]
        return launchers[-1].assign([None, None], facts)[0]

    yield assign
    for launcher in launchers:
        launcher.close()


@pytest.mark.parametrize(
    ("nics", "of_the_machine", "in_the_rank"),
    [
        (None, None, "=lo"),
        (None, "eth9", "eth9"),  # the machine's own setting takes precedence
        ("ib0", None, "=ib0"),
        ("ib0", "eth9", "=ib0"),
    ],
)
def test_a_rank_with_a_gpu_gets_settings_for_nccl(
    assign: Any,
    monkeypatch: pytest.MonkeyPatch,
    nics: str | None,
    of_the_machine: str | None,
    in_the_rank: str,
) -> None:
    monkeypatch.setattr(os, "environ", {"NCCL_SOCKET_IFNAME": of_the_machine} if of_the_machine else {})
    process.set_variables(assign(use_gpu=True, nics=nics))
    assert os.environ["NCCL_SOCKET_IFNAME"] == in_the_rank
    assert os.environ["HOROVOD_GLOO_IFACE"] == (nics or "lo")


def test_nccl_avoids_the_loopback_if_the_trial_may_grow_to_another_host(assign: Any) -> None:
    """It keeps the interface of the first world."""
    assignment = assign(use_gpu=True, num_slots=None, min_workers=2, max_workers=4)
    assert assignment.defaults == {"NCCL_SOCKET_IFNAME": "=eth0"}
    assert assignment.environment["HOROVOD_GLOO_IFACE"] == "lo"


def test_a_rank_keeps_its_gpu_when_its_local_rank_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"CUDA_VISIBLE_DEVICES": "2,3", "SIZE": "2"})
    rank = object.__new__(process.Rank)
    rank._forming = threading.Lock()
    alone = Assignment((RankInfo(0, 1, 0, 1, 0, 1),), {"CUDA_VISIBLE_DEVICES": "3", "SIZE": "1"})
    rank._rejoin(Mock(), RankRejoin(alone, 1, 0, b""))
    assert os.environ == {"CUDA_VISIBLE_DEVICES": "2,3", "SIZE": "1"}


def test_a_rank_without_a_gpu_gets_no_settings_for_nccl(assign: Any) -> None:
    assignment = assign(nics="ib0")
    assert "NCCL_SOCKET_IFNAME" not in assignment.environment | assignment.defaults


def test_a_rank_has_the_gpu_that_ray_reserved_whatever_the_machine_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # as Ray leaves it if it may not set it
    monkeypatch.setattr(ray, "get_gpu_ids", lambda: [1])
    context = Mock(get_accelerator_ids=lambda: {"GPU": ["1"], "TPU": []})
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "10.0.0.5")
    actor = object.__new__(TrainingActor)
    actor._node_id = actor._host = "a"
    actor._rank = Mock()
    monkeypatch.setattr(actor, "_prepare", Mock())
    assert actor.describe().gpu_ids == ("1",)


@pytest.mark.parametrize(("node", "address"), [("a", "127.0.0.1"), ("b", "127.0.0.2")])
def test_the_rendezvous_can_be_reached_from_the_ranks_host(
    assign: Any, monkeypatch: pytest.MonkeyPatch, node: str, address: str
) -> None:
    """The coordinator's host may have lost all ranks of an elastic trial."""
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.2")
    environment = assign(node).environment
    assert environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"].startswith(f"{address}:")


def test_a_rank_on_a_tpu_is_numbered_by_its_chip_and_rank_0_by_the_first_host_of_the_slice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the order of the actors, and wherever the coordinator is."""
    hosts = [TpuHost(node, 2, "s", i, "v5litepod-4", "2x2") for i, node in enumerate(["a", "b"])]
    monkeypatch.setattr(reservation, "tpu_hosts", lambda: hosts)
    spec = make_spec(backend="torch", use_tpu=True, num_hosts=2)
    group: Any = Mock(bundle_specs=[{"TPU": 2.0, "TPU-v5litepod-4-head": 1.0}])
    placed: list[Any] = []

    def open_rendezvous(ranks: Any) -> Any:
        placed.extend(ranks)
        return [{} for _ in ranks], lambda: None

    tpu = reservation.Reservation(spec, group)
    launcher = ActorLauncher(
        spec, group, node_id="b", make_backend=Mock(), open_rendezvous=open_rendezvous, tpu=tpu
    )
    chips = [("b", "1"), ("a", "1"), ("b", "0"), ("a", "0")]
    infos = [
        WorkerInfo(node, "10.0.0.5", f"host-{node}", 7, 0.0, tpu_ids=(chip,), interfaces=INTERFACES)
        for node, chip in chips
    ]
    assigned = launcher.assign([None] * 4, infos)
    launcher.close()
    found = [(each.rank, each.local_rank, each.cross_rank) for (each,) in (a.rank_infos for a in assigned)]
    assert found == [(3, 1, 1), (1, 1, 0), (2, 0, 1), (0, 0, 0)]
    assert [each.rank_info.rank for each in placed] == [3, 1, 2, 0]
    assert tpu.chips is not None and [worker for worker, _ in tpu.chips.processes] == [3, 1, 2, 0]
