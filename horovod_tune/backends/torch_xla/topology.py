"""The environment of a torch_xla trial's processes, and their ranks. Pure.

Names and values are those of torch_xla 2.9.0 (`torch_xla._internal.tpu.configure_topology`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from horovod_tune.errors import SpecError, StartFailed
from horovod_tune.messages import Assignment, RankInfo
from horovod_tune.spec.placement import Placement
from horovod_tune.spec.trial_spec import TrialSpec
from horovod_tune.tpu.chips import PROCESS_BOUNDS, TrialChips
from horovod_tune.tpu.slices import is_undivided

# A chip of v2 or v3 is two devices, and so two ranks, in one process.
RANKS_OF_A_CHIP = (1, 2)
TPU = {"PJRT_DEVICE": "TPU"}


def cpu_placement(spec: TrialSpec) -> Placement:
    """Return the bundle of a trial on torch_xla's CPU device, which is one device on one host."""
    if spec.num_hosts != 1 or spec.num_slots not in (None, 1):
        raise SpecError(
            "with PJRT_DEVICE=CPU torch_xla has one device, so num_hosts and num_slots must be 1, got "
            f"num_hosts={spec.num_hosts} and num_slots={spec.num_slots}"
        )
    return Placement(({"CPU": spec.num_cpus_per_slot},), "PACK")


@dataclass(frozen=True)
class LaunchPlan:
    """The environment of a host's ranks.

    ``environment`` is common to them; ``of_each`` holds the variables of each process, in the order of
    processes on the host (empty: torch_xla determines them).
    """

    environment: dict[str, str] = field(default_factory=dict)
    of_each: tuple[dict[str, str], ...] = ()


def plans_of(chips: TrialChips, num_hosts: int) -> list[LaunchPlan]:
    """Return each host's plan; it names chips unless the trial has all of a host, or of a v7x slice.

    Without names, torch_xla waits for the slice's other hosts.
    """
    if chips.is_whole and (num_hosts == 1 or is_undivided(chips.host.pod_type)):
        return [LaunchPlan(TPU)] * num_hosts
    bounds = {}
    if not chips.is_whole:
        mesh = PROCESS_BOUNDS[len(chips.processes)]
        bounds = {"TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": mesh}
        # The older names of the two bounds above; Ray sets these for the whole actor.
        bounds |= {"TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1", "TPU_HOST_BOUNDS": mesh}
    of_each: list[list[dict[str, str]]] = [[] for _ in range(num_hosts)]
    for task, (worker, _) in enumerate(chips.processes):
        of_each[worker].append({**chips.variables(task), **bounds})
    return [LaunchPlan(TPU, tuple(each)) for each in of_each]


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
