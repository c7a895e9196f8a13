"""The environment of a TPU trial's processes, and their ranks. Pure.

Names and values are those of torch_xla 2.9.0 (`torch_xla._internal.tpu.configure_topology`) and of Ray 2.60's
accelerator manager (`ray._private.accelerators.tpu`), which follow Cloud TPU's documentation.
"""

from __future__ import annotations

from collections.abc import Sequence

from horovod_tune.errors import StartFailed
from horovod_tune.messages import Assignment, RankInfo, WorkerInfo
from horovod_tune.xla.runtime import LaunchPlan, Ordinals
from horovod_tune.xla.slices import is_undivided

# The mesh (x,y,z) of a host's chips, by their number, with one process per chip.
PROCESS_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
# A chip of v2 or v3 is two devices, and so two ranks, in one process.
RANKS_OF_A_CHIP = (1, 2)
TPU = {"PJRT_DEVICE": "TPU"}
# The first of the ports on which a host's TPU processes find each other; torch_xla's own default.
FIRST_PORT = 8476


def plans_for_slice(
    infos: Sequence[WorkerInfo], workers: Sequence[int], chips: int, pod_type: str | None = None
) -> list[LaunchPlan]:
    """Return each host's plan: every process's address, in the order of the worker ids.

    On v7x torch_xla finds the addresses itself, in the metadata of the slice.

    >>> infos = [WorkerInfo("a", "10.0.0.1", "ha", 1, 0.0), WorkerInfo("b", "10.0.0.2", "hb", 1, 0.0)]
    >>> plans_for_slice(infos, [1, 0], 1)[0].of_each[0]["TPU_PROCESS_ADDRESSES"]
    '10.0.0.2:8476,10.0.0.1:8476'
    >>> plans_for_slice(infos, [1, 0], 1)[0].of_each[0]["CLOUD_TPU_TASK_ID"]
    '1'
    """
    if is_undivided(pod_type):
        return [LaunchPlan(TPU)] * len(infos)
    ips = [info.node_ip for _, info in sorted(zip(workers, infos, strict=True), key=lambda pair: pair[0])]
    addresses = ",".join(f"{ip}:{FIRST_PORT + chip}" for ip in ips for chip in range(chips))
    return [
        LaunchPlan(
            TPU,
            of_each=tuple(
                {
                    "TPU_PROCESS_ADDRESSES": addresses,
                    "TPU_PROCESS_PORT": str(FIRST_PORT + chip),
                    "CLOUD_TPU_TASK_ID": str(worker * chips + chip),
                    "TPU_VISIBLE_CHIPS": str(chip),
                }
                for chip in range(chips)
            ),
        )
        for worker in workers
    ]


def plan_for_chips(chips: Sequence[str], chips_of_slice: int, pod_type: str | None = None) -> LaunchPlan:
    """Return a single host's plan, which names the chips unless the trial has all of its slice's.

    Without names, torch_xla waits for the slice's other hosts. Two trials on one host must not share a port,
    so each chip has its own.

    Raises:
        StartFailed: the trial landed on part of a host that has to be taken whole.

    >>> plan_for_chips(["0", "1", "2", "3"], 4).of_each
    ()
    >>> each = plan_for_chips(["2", "3"], 4).of_each[1]
    >>> each["TPU_VISIBLE_CHIPS"], each["TPU_PROCESS_BOUNDS"], each["TPU_PROCESS_PORT"]
    ('3', '1,2,1', '8479')
    """
    if len(chips) >= chips_of_slice:
        return LaunchPlan(TPU)
    if is_undivided(pod_type):
        raise StartFailed(
            f"a trial on TPU v7x must have all {chips_of_slice} chips of its slice, got {len(chips)}: set "
            "num_hosts and num_slots, or tpu_type"
        )
    addresses = ",".join(f"localhost:{FIRST_PORT + int(chip)}" for chip in chips)
    bounds = PROCESS_BOUNDS[len(chips)]
    return LaunchPlan(
        TPU,
        of_each=tuple(
            {
                "TPU_VISIBLE_CHIPS": chip,
                "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1",
                "TPU_PROCESS_BOUNDS": bounds,
                # The older names of the two bounds above; Ray sets these for the whole actor.
                "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1",
                "TPU_HOST_BOUNDS": bounds,
                "TPU_PROCESS_ADDRESSES": addresses,
                "TPU_PROCESS_PORT": str(FIRST_PORT + int(chip)),
                "CLOUD_TPU_TASK_ID": str(index),
            }
            for index, chip in enumerate(chips)
        ),
    )


def assignments_of(ordinals: Sequence[Sequence[Ordinals]], *, num_slots: int | None) -> list[Assignment]:
    """Return each host's ranks, as its processes stated them: on a TPU the topology decides which is rank 0.

    Args:
        ordinals: the ordinals of each host's ranks.
        num_slots: the number of chips requested on each host; None for all chips of a host.

    Raises:
        StartFailed: the ordinals are not 0 to the number of ranks - 1, or a host's number of ranks is wrong.

    >>> there = [[Ordinals(2, 3, 0, 1)], [Ordinals(0, 3, 0, 2), Ordinals(1, 3, 1, 2)]]
    >>> [[each.rank for each in a.rank_infos] for a in assignments_of(there, num_slots=None)]
    [[2], [0, 1]]
    >>> assignments_of(there, num_slots=None)[0].rank_infos[0].cross_rank
    1
    """
    found = sorted(each.ordinal for host in ordinals for each in host)
    size = ordinals[0][0].world_size
    if found != list(range(size)):
        raise StartFailed(f"the processes have the ordinals {found}, expected 0 to {size - 1}")
    first_of = sorted(range(len(ordinals)), key=lambda i: min(each.ordinal for each in ordinals[i]))
    assignments = []
    for i, host in enumerate(ordinals):
        cross = {"cross_rank": first_of.index(i), "cross_size": len(ordinals)}
        if num_slots is not None and len(host) not in [num_slots * ranks for ranks in RANKS_OF_A_CHIP]:
            raise StartFailed(
                f"the trial needs a rank (two on v2 and v3) for each of {num_slots} chip(s) on each host, "
                f"but torch_xla started {len(host)}"
            )
        rank_infos = (
            RankInfo(each.ordinal, size, each.local_ordinal, each.local_size, **cross) for each in host
        )
        assignments.append(Assignment(tuple(rank_infos)))
    return assignments
