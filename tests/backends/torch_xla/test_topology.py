"""What only a TPU can show of torch_xla is decided in pure functions; here against its own values."""

from __future__ import annotations

import types
from typing import Any

import pytest

from horovod_tune.backends.torch_xla import topology, xla_launcher
from horovod_tune.errors import SpecError, StartFailed
from horovod_tune.messages import RankInfo, WorkerInfo
from horovod_tune.spec.trial_spec import make_spec
from horovod_tune.tpu import reservation
from horovod_tune.tpu.chips import chips_of
from horovod_tune.tpu.slices import TpuHost

ALL = ("0", "1", "2", "3")


def make_slice(count: int, *, chips: int = 4, pod_type: str = "v4-16") -> list[TpuHost]:
    return [TpuHost(f"s-{worker}", chips, "s", worker, pod_type) for worker in range(count)]


def make_info(node: str, chips: tuple[str, ...] = ALL, ip: str = "10.0.0.1") -> WorkerInfo:
    return WorkerInfo(node, ip, f"host-{node}", 1, 0.0, tpu_ids=chips)


def plans(infos: list[WorkerInfo], hosts: list[TpuHost]) -> list[topology.LaunchPlan]:
    return topology.plans_of(chips_of(infos, hosts, num_hosts=len(infos)), len(infos))


def test_one_chip_of_a_host_is_a_world_of_its_own() -> None:
    # torch_xla 2.9, tpu.configure_one_chip_topology: bounds 1,1,1 for the chips of a process and for the
    # processes; Ray 2.60 sets the older names to the same for one chip.
    (environment,) = plans([make_info("s-0", ("2",))], make_slice(1))[0].of_each
    assert environment == {
        "TPU_VISIBLE_CHIPS": "2",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1",
        "TPU_HOST_BOUNDS": "1,1,1",
        "TPU_PROCESS_ADDRESSES": "localhost:8478",
        "TPU_PROCESS_PORT": "8478",
        "CLOUD_TPU_TASK_ID": "0",
    }


def test_two_trials_on_one_host_share_neither_chip_nor_port() -> None:
    first = plans([make_info("s-0", ("0", "1"))], make_slice(1))[0].of_each
    second = plans([make_info("s-0", ("3", "2"))], make_slice(1))[0].of_each
    # Ray 2.60, TPU_CHIPS_PER_HOST_BOUNDS_2_CHIP_CONFIG.
    assert {each["TPU_PROCESS_BOUNDS"] for each in (*first, *second)} == {"1,2,1"}
    assert [each["TPU_VISIBLE_CHIPS"] for each in (*first, *second)] == ["0", "1", "2", "3"]
    assert [each["CLOUD_TPU_TASK_ID"] for each in (*first, *second)] == ["0", "1", "0", "1"]
    assert len({each["TPU_PROCESS_PORT"] for each in (*first, *second)}) == 4
    assert first[0]["TPU_PROCESS_ADDRESSES"] == "localhost:8476,localhost:8477"


@pytest.mark.parametrize(("count", "bounds"), [(1, set()), (2, {"2,2,1"})])
def test_a_host_by_itself_does_not_wait_for_the_others_of_its_slice(
    monkeypatch: pytest.MonkeyPatch, count: int, bounds: set[str]
) -> None:
    monkeypatch.setattr(reservation, "tpu_hosts", lambda: make_slice(count))
    group: Any = types.SimpleNamespace(bundle_specs=[{"TPU": 4.0}])
    launcher = xla_launcher.XlaLauncher(make_spec(use_tpu=True, num_slots=4), group, node_id="s-0")
    (plan,) = launcher._plans([make_info("s-0")])
    assert {each["TPU_PROCESS_BOUNDS"] for each in plan.of_each} == bounds


def test_the_processes_of_a_slice_know_each_others_addresses_by_worker_id() -> None:
    # torch_xla 2.9, tpu.configure_topology: ports from 8476 on each host, the task id is
    # worker id * processes of a host + local rank, addresses in the order of the workers.
    infos = [make_info("s-1", ("0", "1")), make_info("s-0", ("0", "1"), "10.0.0.2")]
    found = plans(infos, make_slice(2, chips=2))
    assert found[0].of_each[1] == {
        "TPU_PROCESS_ADDRESSES": "10.0.0.2:8476,10.0.0.2:8477,10.0.0.1:8476,10.0.0.1:8477",
        "TPU_PROCESS_PORT": "8477",
        "CLOUD_TPU_TASK_ID": "3",
        "TPU_VISIBLE_CHIPS": "1",
    }
    assert [each["CLOUD_TPU_TASK_ID"] for plan in found for each in plan.of_each] == ["2", "3", "0", "1"]


@pytest.mark.parametrize(
    ("ranks", "num_slots", "said"),
    [
        ([[RankInfo(0, 2, 0, 1, 0, 1)]] * 2, None, r"ordinals \[0, 0\], expected 0 to 1"),
        ([[RankInfo(0, 1, 0, 1, 0, 1)]], 2, r"each of 2 chip\(s\) on each host, but torch_xla started 1"),
        ([[RankInfo(i, 4, i, 4, 0, 1) for i in range(4)]], 1, r"each of 1 chip\(s\) .* torch_xla started 4"),
    ],
)
def test_processes_that_are_no_world_are_refused(ranks: Any, num_slots: int | None, said: str) -> None:
    with pytest.raises(StartFailed, match=said):
        topology.assignments_of(ranks, num_slots=num_slots)


def test_a_chip_of_v2_or_v3_is_two_ranks() -> None:
    # torch_xla 2.9, tpu.num_logical_cores_per_chip: 2 up to version 3, each a device of its chip's process.
    ranks = [[RankInfo(i, 4, i, 4, 0, 1) for i in range(4)]]
    (assignment,) = topology.assignments_of(ranks, num_slots=2)
    assert [(each.rank, each.local_rank) for each in assignment.rank_infos] == [(i, i) for i in range(4)]


def test_hosts_of_v7x_are_left_to_torch_xla() -> None:
    # torch_xla 2.9, tpu.configure_topology: TPU_PROCESS_BOUNDS has a fourth number on version 7.
    assert plans([make_info("s-0")], make_slice(1, pod_type="v7x-8"))[0].of_each == ()
    found = plans([make_info("s-1"), make_info("s-0")], make_slice(2, pod_type="v7x-16"))
    assert [plan.of_each for plan in found] == [(), ()]


def test_the_cpu_device_is_one_rank_on_one_host() -> None:
    assert topology.cpu_placement(make_spec(use_tpu=True)).bundles == ({"CPU": 1.0},)
    with pytest.raises(SpecError, match=r"torch_xla has one device.*num_hosts=2 and num_slots=3"):
        topology.cpu_placement(make_spec(use_tpu=True, num_hosts=2, num_slots=3))
