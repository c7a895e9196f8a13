"""The environment of a TPU trial's processes, and their ranks. Pure.

Names and values are those of torch_xla 2.9.0 (`torch_xla._internal.tpu.configure_topology`) and of Ray 2.60's
accelerator manager (`ray._private.accelerators.tpu`), which follow Cloud TPU's documentation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from horovod_tune.errors import StartFailed
from horovod_tune.messages import Assignment, RankInfo, WorkerInfo
from horovod_tune.xla.slices import is_undivided

# The mesh (x,y,z) of a host's chips, by their number, with one process per chip.
PROCESS_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
# A chip of v2 or v3 is two devices, and so two ranks, in one process.
RANKS_OF_A_CHIP = (1, 2)
TPU = {"PJRT_DEVICE": "TPU"}
# The first of the ports on which a host's TPU processes find each other; torch_xla's own default.
FIRST_PORT = 8476


@dataclass(frozen=True)
class LaunchPlan:
    """The environment of a host's ranks.

    ``environment`` is common to them; ``of_each`` holds the variables of each process, in the order of
    processes on the host (empty: torch_xla determines them).
    """

    environment: dict[str, str] = field(default_factory=dict)
    of_each: tuple[dict[str, str], ...] = ()


def plans_for_slice(
    infos: Sequence[WorkerInfo], workers: Sequence[int], chips: int, pod_type: str | None = None
) -> list[LaunchPlan]:
    """Return each host's plan: every process's address, in the order of the worker ids.

    On v7x torch_xla finds the addresses itself, in the metadata of the slice.
    """
    if is_undivided(pod_type):
        return [LaunchPlan(TPU)] * len(infos)
    ips = [info.node_ip for _, info in sorted(zip(workers, infos, strict=True), key=lambda pair: pair[0])]
    addresses = [f"{ip}:{FIRST_PORT + chip}" for ip in ips for chip in range(chips)]
    on_host = [str(chip) for chip in range(chips)]
    return [_plan(on_host, addresses, first_task=worker * chips) for worker in workers]


def plan_for_chips(chips: Sequence[str], chips_of_slice: int, pod_type: str | None = None) -> LaunchPlan:
    """Return a single host's plan, which names the chips unless the trial has all of its slice's.

    Without names, torch_xla waits for the slice's other hosts. Two trials on one host must not share a port,
    so each chip has its own.

    Raises:
        StartFailed: the trial landed on part of a host that has to be taken whole.
    """
    if len(chips) >= chips_of_slice:
        return LaunchPlan(TPU)
    if is_undivided(pod_type):
        raise StartFailed(
            f"a trial on TPU v7x must have all {chips_of_slice} chips of its slice, got {len(chips)}: set "
            "num_hosts and num_slots, or tpu_type"
        )
    bounds = PROCESS_BOUNDS[len(chips)]
    return _plan(
        chips,
        [f"localhost:{FIRST_PORT + int(chip)}" for chip in chips],
        TPU_CHIPS_PER_PROCESS_BOUNDS="1,1,1",
        TPU_PROCESS_BOUNDS=bounds,
        # The older names of the two bounds above; Ray sets these for the whole actor.
        TPU_CHIPS_PER_HOST_BOUNDS="1,1,1",
        TPU_HOST_BOUNDS=bounds,
    )


def _plan(chips: Sequence[str], addresses: Sequence[str], first_task: int = 0, **bounds: str) -> LaunchPlan:
    """Return the plan of a host with one process for each of ``chips``."""
    of_each = [
        {
            "TPU_VISIBLE_CHIPS": chip,
            "TPU_PROCESS_ADDRESSES": ",".join(addresses),
            "TPU_PROCESS_PORT": str(FIRST_PORT + int(chip)),
            "CLOUD_TPU_TASK_ID": str(task),
            **bounds,
        }
        for task, chip in enumerate(chips, first_task)
    ]
    return LaunchPlan(TPU, tuple(of_each))


def assignments_of(rank_infos: Sequence[Sequence[RankInfo]], *, num_slots: int | None) -> list[Assignment]:
    """Return each host's ranks, as its processes stated them: on a TPU the topology decides which is rank 0.

    Args:
        rank_infos: those of each host's ranks; their place among the hosts is not known yet.
        num_slots: the number of chips requested on each host; None for all chips of a host.

    Raises:
        StartFailed: the ranks are not 0 to their number - 1, or a host's number of ranks is wrong.

    >>> there = [[RankInfo(2, 3, 0, 1, 0, 1)], [RankInfo(0, 3, 0, 2, 0, 1), RankInfo(1, 3, 1, 2, 0, 1)]]
    >>> hosts = assignments_of(there, num_slots=None)
    >>> [[(each.rank, each.cross_rank) for each in host.rank_infos] for host in hosts]
    [[(2, 1)], [(0, 0), (1, 0)]]
    """
    found = sorted(each.rank for host in rank_infos for each in host)
    size = rank_infos[0][0].size
    if found != list(range(size)):
        raise StartFailed(f"the processes have the ordinals {found}, expected 0 to {size - 1}")
    first_of = sorted(min(each.rank for each in host) for host in rank_infos)
    assignments = []
    for host in rank_infos:
        if num_slots is not None and len(host) not in [num_slots * ranks for ranks in RANKS_OF_A_CHIP]:
            raise StartFailed(
                f"the trial needs a rank (two on v2 and v3) for each of {num_slots} chip(s) on each host, "
                f"but torch_xla started {len(host)}"
            )
        cross_rank = first_of.index(min(each.rank for each in host))
        cross = {"cross_rank": cross_rank, "cross_size": len(rank_infos)}
        assignments.append(Assignment(tuple(replace(each, **cross) for each in host)))
    return assignments
