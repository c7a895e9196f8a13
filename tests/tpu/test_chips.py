"""What only a TPU can show is decided in pure functions; here against the values that documentation gives."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from horovod_tune.backends.torch_distributed.torch_backend import tpu_environment
from horovod_tune.errors import ResourcesUnavailable, SpecError, StartFailed
from horovod_tune.messages import WorkerInfo
from horovod_tune.spec.tpu_types import shape_of
from horovod_tune.spec.trial_spec import make_spec
from horovod_tune.tpu import slices
from horovod_tune.tpu.chips import chips_of
from horovod_tune.tpu.slices import TpuHost


def make_slice(name: str, count: int, *, chips: int = 4, pod_type: str = "v4-16") -> list[TpuHost]:
    return [TpuHost(f"{name}-{worker}", chips, name, worker, pod_type) for worker in range(count)]


def make_facts(*nodes: str, chips: tuple[str, ...] = ()) -> list[WorkerInfo]:
    return [
        WorkerInfo(node, f"10.0.0.{i + 1}", f"host-{node}", 1, 0.0, tpu_ids=chips)
        for i, node in enumerate(nodes)
    ]


def spec(**arguments: Any) -> Any:
    return make_spec(use_tpu=True, **arguments)


ALL = ("0", "1", "2", "3")
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


def test_hosts_of_two_slices_or_half_a_slice_are_no_world() -> None:
    hosts = [*make_slice("s", 2), *make_slice("t", 2)]
    with pytest.raises(StartFailed, match=r"not one whole TPU slice: host-s-0 \(slice s, worker 0\)"):
        chips_of(make_facts("s-0", "t-1", chips=ALL), hosts, num_hosts=2)
    for landed in (["s-1", "s-1"], ["s-0"]):
        with pytest.raises(StartFailed, match="not one whole TPU slice"):
            chips_of(make_facts(*landed, chips=ALL), hosts, num_hosts=2)
    with pytest.raises(StartFailed, match=r"has 2 host\(s\) in Ray, but num_hosts=3"):
        slices.rest_of_slice(spec(num_hosts=3), "s-0", hosts)


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


def test_hosts_of_v7x_are_taken_whole() -> None:
    with pytest.raises(SpecError, match="num_slots must be all chips of a host on TPU v7x, got 2"):
        slices.tpu_placement(spec(num_slots=2), make_slice("s", 1, pod_type="v7x-8"))
    with pytest.raises(StartFailed, match="must have all 4 chips of its slice, got 2"):
        chips_of(make_facts("s-0", chips=("0", "1")), make_slice("s", 1, pod_type="v7x-8"), num_hosts=1)


def one_per_chip(node: str, ip: str, chips: str) -> list[WorkerInfo]:
    return [WorkerInfo(node, ip, f"host-{node}", 1, 0.0, tpu_ids=(chip,)) for chip in chips]


def test_a_chip_is_named_to_torch_tpu_by_its_own_variable() -> None:
    # torch_tpu 0.2.0 overwrites TPU_VISIBLE_CHIPS, which Ray sets, with LOCAL_RANK or TPU_VISIBLE_DEVICES.
    chips = chips_of(one_per_chip("s-0", "10.0.0.1", "32"), make_slice("s", 1), num_hosts=1)
    assert chips.processes == ((1, 2), (0, 3)), "by the chips' numbers"
    assert tpu_environment(chips, 1) == {
        "TPU_VISIBLE_CHIPS": "3",
        "TPU_VISIBLE_DEVICES": "3",
        "TPU_PROCESS_ADDRESSES": "localhost:8478,localhost:8479",
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": "localhost:8478,localhost:8479",
        "TPU_PROCESS_PORT": "8479",
        "CLOUD_TPU_TASK_ID": "1",
        "TORCH_TPU_TOPOLOGY": "1,2,1",
        "ACCELERATE_TORCH_DEVICE": "tpu",
    }


def test_the_ranks_of_a_slice_are_in_the_order_of_its_hosts_and_chips() -> None:
    infos = [*one_per_chip("s-1", "10.0.0.1", "1023"), *one_per_chip("s-0", "10.0.0.2", "0123")]
    chips = chips_of(infos, with_topology("2x4", make_slice("s", 2, pod_type="v6e-8")), num_hosts=2)
    assert [infos[worker].node_id for worker, _ in chips.processes] == ["s-0"] * 4 + ["s-1"] * 4
    assert [chip for _, chip in chips.processes] == [0, 1, 2, 3] * 2
    assert chips.addresses[3:5] == ("10.0.0.2:8479", "10.0.0.1:8476")
    assert tpu_environment(chips, 7)["TORCH_TPU_TOPOLOGY"] == "2,4,1"


def with_topology(topology: str, hosts: list[TpuHost]) -> list[TpuHost]:
    return [replace(host, topology=topology) for host in hosts]


@pytest.mark.parametrize(
    ("topology", "pod_type", "chips", "mesh"),
    [
        # The tables of torch_tpu 0.2.0, hardware.py.
        ("1x1", "v6e-1", "0", "1,1,1"),
        ("2x2", "v5litepod-4", "0123", "2,2,1"),
        ("2x4", "v6e-8", "01234567", "2,4,1"),
        ("2x2x1", "v5p-8", "0123", "2,2,1"),
        # Two devices on each chip, of which Ray has one TPU each with RAY_TPU_RESOURCE_PER_CHIP=2.
        ("2x2x1", "v7x-8", "01234567", "2,2,1,2"),
        # A hand-made cluster may lack the label.
        (None, None, "0123", "2,2,1"),
    ],
)
def test_the_mesh_of_a_whole_host(topology: Any, pod_type: Any, chips: str, mesh: str) -> None:
    host = TpuHost("a", len(chips), None, None, pod_type, topology)
    assert chips_of(one_per_chip("a", "10.0.0.1", chips), [host], num_hosts=1).mesh() == mesh


@pytest.mark.parametrize(("topology", "pod_type"), [("2x2x1", "v7x-8"), (None, "v7x-8"), ("2x4", "v6e-4")])
def test_a_topology_that_does_not_fit_ray_s_count_is_refused(topology: Any, pod_type: str) -> None:
    host = TpuHost("a", 4, "s", 0, pod_type, topology)
    chips = chips_of(one_per_chip("a", "10.0.0.1", "0123"), [host], num_hosts=1)
    with pytest.raises(StartFailed, match=f"topology {topology} .* its 4 TPUs .*RAY_TPU_RESOURCE_PER_CHIP=2"):
        chips.mesh()
