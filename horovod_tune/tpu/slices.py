"""The resources that a TPU trial requests, and the slices of a cluster. Pure: no Ray, no torch.

Names and values are those of Ray 2.60's accelerator manager (`ray._private.accelerators.tpu`), which follow
Cloud TPU's documentation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horovod_tune.errors import ResourcesUnavailable, SpecError, StartFailed
from horovod_tune.spec.placement import Placement
from horovod_tune.spec.tpu_types import shape_of
from horovod_tune.spec.trial_spec import TrialSpec

# The numbers of chips that one actor may request in Ray: TPU_VALID_CHIP_OPTIONS.
CHIP_COUNTS = (1, 2, 4, 8)
# An amount of a resource that is so small that it selects the kind of host, but leaves room for other trials.
PIN = 0.001
_NUM_HOSTS = "num_hosts must be {needed} for tpu_type {tpu_type!r}, or left out, got {got}"
SLICE_LABEL, WORKER_LABEL, TYPE_LABEL = "ray.io/tpu-slice-name", "ray.io/tpu-worker-id", "ray.io/tpu-pod-type"
TOPOLOGY_LABEL = "ray.io/tpu-topology"


@dataclass(frozen=True)
class TpuHost:
    """The TPU resources of a Ray node; ``chips`` is 0 for a node without TPUs.

    ``topology`` is that of the slice, as Cloud TPU writes it (``2x4``).
    """

    node_id: str
    chips: int
    slice_name: str | None = None
    worker_id: int | None = None
    pod_type: str | None = None
    topology: str | None = None


def host_of(node: Mapping[str, Any]) -> TpuHost:
    """Return the chips and the slice of a node, from its entry in ``ray.nodes()``.

    >>> host_of({"NodeID": "a", "Resources": {"TPU": 4.0, "TPU-v4-16-head": 1.0}, "Labels": {
    ...     "ray.io/tpu-slice-name": "s", "ray.io/tpu-worker-id": "0"}})
    TpuHost(node_id='a', chips=4, slice_name='s', worker_id=0, pod_type='v4-16', topology=None)
    """
    resources, labels = node.get("Resources") or {}, node.get("Labels") or {}
    heads = [name for name in resources if name.startswith("TPU-") and name.endswith("-head")]
    worker = labels.get(WORKER_LABEL)
    return TpuHost(
        node_id=node["NodeID"],
        chips=int(resources.get("TPU", 0)),
        slice_name=labels.get(SLICE_LABEL),
        worker_id=int(worker) if worker is not None else None,
        pod_type=labels.get(TYPE_LABEL) or (heads[0][len("TPU-") : -len("-head")] if heads else None),
        topology=labels.get(TOPOLOGY_LABEL),
    )


def tpu_placement(spec: TrialSpec, hosts: Sequence[TpuHost]) -> Placement:
    """Return the bundle of a TPU trial: chips of one host, or the first host of a slice for the whole slice.

    The other hosts are requested when the slice is known (`rest_of_slice`): a placement group cannot request
    "hosts of the same slice".

    Raises:
        SpecError: arguments conflict, or an argument is missing that the cluster does not determine.
        ResourcesUnavailable: the cluster has no TPU host or slice of this shape, or several kinds of slices.
    """
    if spec.num_hosts == 1:
        # A host that is a whole slice has the resource of worker 0. The tiny amount lets trials share it.
        pod_type, chips, amount = spec.tpu_type, _chips_on_a_host(spec, hosts), PIN
    else:
        pod_type, chips, amount = *_slice_shape(spec, hosts), 1.0
    # Ray gives worker 0 of every slice of this type the resource.
    head = {f"TPU-{pod_type}-head": amount} if pod_type is not None else {}
    return Placement(({**_bundle(spec, chips), **head},), "PACK")


def _chips_on_a_host(spec: TrialSpec, hosts: Sequence[TpuHost]) -> int:
    if spec.tpu_type is not None and (needed := shape_of(spec.tpu_type)[0]) != 1:
        raise SpecError(_NUM_HOSTS.format(needed=needed, tpu_type=spec.tpu_type, got=1))
    sizes = Counter(host.slice_name for host in hosts)
    single = [host for host in hosts if host.slice_name is None or sizes[host.slice_name] == 1]
    single = [host for host in single if host.chips and spec.tpu_type in (None, host.pod_type)]
    chips = spec.num_slots if spec.num_slots is not None else _all_chips_of_a_host(spec, single)
    if chips not in CHIP_COUNTS:
        raise SpecError(f"num_slots must be one of {CHIP_COUNTS} with use_tpu, got {chips}")
    if single and all(is_undivided(host.pod_type) and host.chips > chips for host in single):
        raise SpecError(
            f"num_slots must be all chips of a host on TPU v7x, got {chips}: how to use a part of a host is "
            "not documented"
        )
    return chips


def _bundle(spec: TrialSpec, chips: int) -> dict[str, float]:
    return {"CPU": spec.num_cpus_per_slot * chips, "TPU": float(chips)}


def is_undivided(pod_type: str | None) -> bool:
    """Return True if hosts of this type are taken whole: a chip of v7x is two devices, a fourth dimension."""
    return (pod_type or "").startswith("v7x-")


def _all_chips_of_a_host(spec: TrialSpec, single: Sequence[TpuHost]) -> int:
    counts = {host.chips for host in single}
    if len(counts) == 1:
        return counts.pop()
    if counts:
        raise SpecError(
            f"the cluster's TPU hosts have {' and '.join(map(str, sorted(counts)))} chips: pass "
            "num_slots (chips per trial) or tpu_type (which hosts)"
        )
    if spec.tpu_type is not None:
        return shape_of(spec.tpu_type)[1]
    raise ResourcesUnavailable(
        "the cluster has no TPU host that is a slice by itself. Pass num_hosts for a slice of several hosts, "
        "num_slots or tpu_type if an autoscaler should start a host, or (only with torch_xla) set "
        "PJRT_DEVICE=CPU to try the trial on the CPU."
    )


def slices_of(hosts: Sequence[TpuHost]) -> dict[str, list[TpuHost]]:
    """Return the hosts of each slice in the order of their worker ids, slices of one host included."""
    slices: dict[str, list[TpuHost]] = {}
    for host in hosts:
        if host.chips and host.slice_name is not None:
            slices.setdefault(host.slice_name, []).append(host)
    return {name: sorted(found, key=lambda each: each.worker_id or 0) for name, found in slices.items()}


def _slice_shape(spec: TrialSpec, hosts: Sequence[TpuHost]) -> tuple[str, int]:
    """Return the type and the chips per host of the slice that a trial takes."""
    slices, tpu_type = slices_of(hosts), spec.tpu_type
    sizes = [(each[0].pod_type, len(each), each[0].chips) for each in slices.values()]
    shapes = {
        (pod_type, chips)
        for pod_type, count, chips in sizes
        if count == spec.num_hosts and pod_type is not None and tpu_type in (None, pod_type)
    }
    if len(shapes) > 1:
        raise ResourcesUnavailable(
            f"the cluster has several kinds of TPU slices with {spec.num_hosts} hosts: "
            f"{', '.join(sorted(pod_type for pod_type, _ in shapes))}; pass tpu_type"
        )
    planned = shape_of(tpu_type) if tpu_type is not None else (0, 0)
    if shapes:
        ((pod_type, chips),) = shapes
    elif tpu_type and all(count < planned[0] for pod_type, count, _ in sizes if pod_type == tpu_type):
        # The cluster has no slice of this type, or not all hosts of the slice have joined.
        if spec.num_hosts != planned[0]:
            raise SpecError(_NUM_HOSTS.format(needed=planned[0], tpu_type=tpu_type, got=spec.num_hosts))
        pod_type, chips = tpu_type, planned[1]
    else:
        there = "; ".join(
            f"{name}: {len(each)} host(s) of type {each[0].pod_type}" for name, each in slices.items()
        )
        raise ResourcesUnavailable(
            f"no TPU slice of the cluster has num_hosts={spec.num_hosts} hosts"
            f"{f' of tpu_type {tpu_type!r}' if tpu_type else ''}; there is {there or 'no slice'}"
        )
    if spec.num_slots not in (None, chips):
        chosen = f"all {chips} chips of a host in a slice of several hosts"
        raise SpecError(f"num_slots must be {chosen}, got {spec.num_slots}")
    return pod_type, chips


def rest_of_slice(spec: TrialSpec, head_node: str, hosts: Sequence[TpuHost]) -> list[dict[str, float]]:
    """Return the bundles of the slice's other hosts; in Ray the slice's name is a resource of each of them.

    Raises:
        StartFailed: the head's node is not in a slice with ``spec.num_hosts`` hosts.
    """
    assert spec.num_hosts is not None
    slices = slices_of(hosts).values()
    slice_hosts = next((each for each in slices if head_node in [host.node_id for host in each]), [])
    if len(slice_hosts) != spec.num_hosts:
        there = f"{len(slice_hosts)} host(s) in Ray"
        raise StartFailed(f"the slice of node {head_node[:8]} has {there}, but num_hosts={spec.num_hosts}")
    name = str(slice_hosts[0].slice_name)
    return [{**_bundle(spec, slice_hosts[0].chips), name: 1.0}] * (spec.num_hosts - 1)
