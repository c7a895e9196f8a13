"""What only a TPU can show is decided in pure functions; here against the values that documentation gives."""

from __future__ import annotations

import re
import types
from typing import Any

import pytest

from horovod_tune.errors import ResourcesUnavailable, SpecError, StartFailed
from horovod_tune.messages import RankInfo, WorkerInfo
from horovod_tune.spec.tpu_types import shape_of
from horovod_tune.spec.trial_spec import make_spec
from horovod_tune.xla import slices, topology, xla_launcher
from horovod_tune.xla.slices import TpuHost


def make_slice(name: str, count: int, *, chips: int = 4, pod_type: str = "v4-16") -> list[TpuHost]:
    return [TpuHost(f"{name}-{worker}", chips, name, worker, pod_type) for worker in range(count)]


def make_facts(*nodes: str, chips: tuple[str, ...] = ()) -> list[WorkerInfo]:
    return [
        WorkerInfo(node, f"10.0.0.{i + 1}", f"host-{node}", 1, 0.0, tpu_ids=chips)
        for i, node in enumerate(nodes)
    ]


def spec(**arguments: Any) -> Any:
    return make_spec(use_tpu=True, **arguments)


LARGE = make_slice("large", 4, pod_type="v4-32")
TWO_KINDS = [*make_slice("a", 2), *make_slice("b", 2, pod_type="v5p-16")]
PAIR = make_slice("a", 2, pod_type="v6e-8")
SINGLE = [*make_slice("a", 1, pod_type="v4-8"), *make_slice("b", 1, pod_type="v6e-8", chips=8)]


@pytest.mark.parametrize(
    ("arguments", "hosts", "chips", "head"),
    [
        ({}, [TpuHost("head", 0), TpuHost("a", 8), TpuHost("b", 8)], 8, {}),
        ({"num_slots": 2}, [TpuHost("a", 8)], 2, {}),
        # Ray's way to a whole slice: its head, then the others by the slice's name (ray.util.tpu).
        ({"num_hosts": 2}, [*make_slice("small", 2), *LARGE], 4, {"TPU-v4-16-head": 1.0}),
        ({"tpu_type": "v4-16"}, TWO_KINDS, 4, {"TPU-v4-16-head": 1.0}),
        ({"tpu_type": "v5p-16"}, TWO_KINDS, 4, {"TPU-v5p-16-head": 1.0}),
        ({"tpu_type": "v6e-8"}, SINGLE, 8, {"TPU-v6e-8-head": slices.PIN}),
        ({"tpu_type": "v6e-8", "num_slots": 4}, SINGLE, 4, {"TPU-v6e-8-head": slices.PIN}),
        # GKE offers v6e-8 as two machines of four chips as well (ct6e-standard-4t, topology 2x4).
        ({"tpu_type": "v6e-8", "num_hosts": 2}, PAIR, 4, {"TPU-v6e-8-head": 1.0}),
        # An autoscaler brings it, or its last host.
        ({"tpu_type": "v4-32"}, [], 4, {"TPU-v4-32-head": 1.0}),
        ({"tpu_type": "v4-32"}, LARGE[:3], 4, {"TPU-v4-32-head": 1.0}),
        ({"tpu_type": "v5litepod-8"}, [], 8, {"TPU-v5litepod-8-head": slices.PIN}),
    ],
)
def test_a_trial_takes_chips_of_a_host_or_the_head_of_a_slice(
    arguments: dict[str, Any], hosts: list[TpuHost], chips: int, head: dict[str, float]
) -> None:
    (bundle,) = slices.tpu_placement(spec(num_cpus_per_slot=0.5, **arguments), hosts).bundles
    assert bundle == {"CPU": chips / 2, "TPU": chips, **head}


def test_the_other_hosts_of_a_slice_are_requested_by_its_name() -> None:
    rest = slices.rest_of_slice(spec(num_hosts=4), "large-0", [*make_slice("small", 2), *LARGE])
    assert rest == [{"CPU": 4.0, "TPU": 4.0, "large": 1.0}] * 3


@pytest.mark.parametrize(
    ("arguments", "hosts", "error", "message"),
    [
        ({}, [TpuHost("a", 4), TpuHost("b", 8)], SpecError, "4 and 8 chips: pass num_slots"),
        ({}, make_slice("s", 2), ResourcesUnavailable, "no TPU host that is a slice by itself"),
        # Ray 2.60, TPU_VALID_CHIP_OPTIONS.
        ({"num_slots": 3}, [TpuHost("a", 8)], SpecError, r"one of \(1, 2, 4, 8\) with use_tpu, got 3"),
        ({"num_hosts": 8}, [TpuHost("a", 4)], ResourcesUnavailable, "there is no slice"),
        (
            {"tpu_type": "v6e-8", "num_hosts": 3},
            PAIR,
            ResourcesUnavailable,
            r"num_hosts=3 hosts of tpu_type 'v6e-8'; there is a: 2 host\(s\) of type v6e-8",
        ),
        ({"num_hosts": 2, "num_slots": 2}, make_slice("s", 2), SpecError, "all 4 chips of a host .* got 2"),
        ({"num_hosts": 2}, TWO_KINDS, ResourcesUnavailable, "with 2 hosts: v4-16, v5p-16; pass tpu_type"),
        (
            {"tpu_type": "v4-32", "num_hosts": 2},
            [],
            SpecError,
            "num_hosts must be 4 for tpu_type 'v4-32', or left out, got 2",
        ),
        ({"tpu_type": "v4-32", "num_hosts": 1}, LARGE, SpecError, "num_hosts must be 4 .* got 1"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused(
    arguments: dict[str, Any], hosts: list[TpuHost], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        slices.tpu_placement(spec(**arguments), hosts)


def test_one_chip_of_a_host_is_a_world_of_its_own() -> None:
    # torch_xla 2.9, tpu.configure_one_chip_topology: bounds 1,1,1 for the chips of a process and for the
    # processes; Ray 2.60 sets the older names to the same for one chip.
    (environment,) = topology.plan_for_chips(("2",), 4).of_each
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
    first = topology.plan_for_chips(("0", "1"), 4).of_each
    second = topology.plan_for_chips(("2", "3"), 4).of_each
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
    monkeypatch.setattr(xla_launcher, "tpu_hosts", lambda: make_slice("s", count))
    group: Any = types.SimpleNamespace(bundle_specs=[{"TPU": 4.0}])
    launcher = xla_launcher.XlaLauncher(spec(num_slots=4), group, node_id="s-0")
    (plan,) = launcher._plans(make_facts("s-0", chips=("0", "1", "2", "3")))
    assert {each["TPU_PROCESS_BOUNDS"] for each in plan.of_each} == bounds


def test_the_processes_of_a_slice_know_each_others_addresses_by_worker_id() -> None:
    # torch_xla 2.9, tpu.configure_topology: ports from 8476 on each host, the task id is
    # worker id * processes of a host + local rank, addresses in the order of the workers.
    plans = topology.plans_for_slice(make_facts("a", "b"), [1, 0], 2)
    assert plans[0].of_each[1] == {
        "TPU_PROCESS_ADDRESSES": "10.0.0.2:8476,10.0.0.2:8477,10.0.0.1:8476,10.0.0.1:8477",
        "TPU_PROCESS_PORT": "8477",
        "CLOUD_TPU_TASK_ID": "3",
        "TPU_VISIBLE_CHIPS": "1",
    }
    assert [each["CLOUD_TPU_TASK_ID"] for plan in plans for each in plan.of_each] == ["2", "3", "0", "1"]


def test_hosts_of_two_slices_or_half_a_slice_are_no_world() -> None:
    hosts = [*make_slice("s", 2), *make_slice("t", 2)]
    with pytest.raises(StartFailed, match=r"not one whole TPU slice: host-s-0 \(slice s, worker 0\)"):
        slices.check_slice(make_facts("s-0", "t-1"), hosts)
    with pytest.raises(StartFailed, match="not one whole TPU slice"):
        slices.check_slice(make_facts("s-1", "s-1"), hosts)
    with pytest.raises(StartFailed, match=r"has 2 host\(s\) in Ray, but num_hosts=3"):
        slices.rest_of_slice(spec(num_hosts=3), "s-0", hosts)


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


@pytest.mark.parametrize(
    ("tpu_type", "hosts", "chips"),
    [
        # Cloud TPU's tables of configurations: 4 chips a host, but one host of v5e and v6e has up to 8.
        ("v2-8", 1, 4),
        ("v3-32", 4, 4),
        ("v4-4096", 512, 4),
        ("v5litepod-1", 1, 1),
        ("v5litepod-8", 1, 8),
        ("v5litepod-16", 4, 4),
        ("v5p-32", 4, 4),
        ("v6e-8", 1, 8),
        ("v6e-256", 64, 4),
        ("v7x-16", 2, 4),
    ],
)
def test_a_type_determines_its_hosts_and_chips(tpu_type: str, hosts: int, chips: int) -> None:
    assert shape_of(tpu_type) == (hosts, chips)
    assert spec(tpu_type=tpu_type).num_hosts == hosts


@pytest.mark.parametrize(
    "tpu_type", ["v4-32 ", "v5e-16", "v9-8", "v4-0", "v4", "v4-3", "TPU-v4-32-head", 4, ""]
)
def test_what_is_no_type_is_refused_with_the_names_there_are(tpu_type: object) -> None:
    with pytest.raises(SpecError, match=f"tpu_type must be .*v5litepod.*got {re.escape(repr(tpu_type))}"):
        spec(tpu_type=tpu_type)


def test_a_type_without_a_tpu_is_refused() -> None:
    with pytest.raises(SpecError, match="tpu_type requires use_tpu=True, got tpu_type='v4-8'"):
        make_spec(tpu_type="v4-8")


def test_hosts_of_v7x_are_taken_whole_and_left_to_torch_xla() -> None:
    # torch_xla 2.9, tpu.configure_topology: TPU_PROCESS_BOUNDS has a fourth number on version 7.
    with pytest.raises(SpecError, match="num_slots must be all chips of a host on TPU v7x, got 2"):
        slices.tpu_placement(spec(num_slots=2), make_slice("s", 1, pod_type="v7x-8"))
    with pytest.raises(StartFailed, match="must have all 4 chips of its slice, got 2"):
        topology.plan_for_chips(("0", "1"), 4, "v7x-8")
    assert topology.plan_for_chips(("0", "1", "2", "3"), 4, "v7x-8").of_each == ()
    plans = topology.plans_for_slice(make_facts("a", "b"), [1, 0], 4, "v7x-16")
    assert [plan.of_each for plan in plans] == [(), ()]


def test_the_cpu_device_is_one_rank_on_one_host() -> None:
    assert slices.cpu_placement(spec()).bundles == ({"CPU": 1.0},)
    with pytest.raises(SpecError, match=r"torch_xla has one device.*num_hosts=2 and num_slots=3"):
        slices.cpu_placement(spec(num_hosts=2, num_slots=3))
