"""The chips of a TPU trial, with one process each: their order, addresses and mesh. Pure.

Names and values are those of torch_xla 2.9.0 (`torch_xla._internal.tpu.configure_topology`), of torch_tpu
0.2.0 and of Ray 2.60's accelerator manager (`ray._private.accelerators.tpu`), which follow Cloud TPU's
documentation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from horovod_tune.errors import StartFailed
from horovod_tune.messages import WorkerInfo
from horovod_tune.tpu.slices import TpuHost, is_undivided, slices_of

# The mesh (x,y,z) of a host's chips, by their number, with one process per chip.
PROCESS_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}
# The first of the ports on which a host's TPU processes find each other; torch_xla's own default.
FIRST_PORT = 8476
# The status codes (absl's canonical errors) of the TPU runtime for a peer that has ended.
PEER_ENDED = ("UNAVAILABLE:", "ABORTED:", "DEADLINE_EXCEEDED:")


@dataclass(frozen=True)
class TrialChips:
    """The chips of a trial.

    Attributes:
        processes: the index of each chip's worker, and the chip's number on its host, in the order of the
            task ids: by the worker ids of the hosts, then by number.
        addresses: where the processes find each other, in the same order.
        host: the host of the first chip.
        is_whole: True if these are all chips of a slice.
    """

    processes: tuple[tuple[int, int], ...]
    addresses: tuple[str, ...]
    host: TpuHost
    is_whole: bool

    def variables(self, task: int) -> dict[str, str]:
        """Return the variables in which libtpu finds a process's chip and the other processes."""
        chip = self.processes[task][1]
        return {
            "TPU_VISIBLE_CHIPS": str(chip),
            "TPU_PROCESS_ADDRESSES": ",".join(self.addresses),
            "TPU_PROCESS_PORT": str(FIRST_PORT + chip),
            "CLOUD_TPU_TASK_ID": str(task),
        }

    def mesh(self) -> str:
        """Return the mesh of the processes; its fourth number counts the devices of a v7x chip.

        Raises:
            StartFailed: Ray does not know the slice's topology, or counts one TPU per chip of v7x.

        >>> TrialChips(((0, 0),) * 16, (), TpuHost("a", 4, topology="4x4"), is_whole=True).mesh()
        '4,4,1'
        """
        size, topology = len(self.processes), self.host.topology
        devices = 2 if is_undivided(self.host.pod_type) else 1  # of a chip
        if not self.is_whole or (topology is None and devices == 1 and size == self.host.chips):
            return PROCESS_BOUNDS[size]
        sizes = [int(each) for each in (topology or "0").split("x")]
        if math.prod(sizes) * devices != size:
            raise StartFailed(
                f"the topology {topology} of a slice of type {self.host.pod_type} does not fit its {size} "
                "TPUs in Ray: start Ray there with TPU_TOPOLOGY, on v7x also with RAY_TPU_RESOURCE_PER_CHIP=2"
            )
        return ",".join(map(str, [*sizes, *[1] * (3 - len(sizes)), *[2] * (devices - 1)]))


def chips_of(infos: Sequence[WorkerInfo], hosts: Sequence[TpuHost], *, num_hosts: int) -> TrialChips:
    """Return the chips of a trial's workers, each of which has one chip or all of its host's.

    Two trials on one host must not share a port, so each chip has its own.

    Raises:
        StartFailed: the workers of several hosts do not have a whole slice, or those of v7x not all chips.
    """
    by_node = {host.node_id: host for host in hosts}
    placed = sorted(
        (by_node[info.node_id].worker_id or 0, info.node_id, int(chip), i)
        for i, info in enumerate(infos)
        for chip in info.tpu_ids
    )
    first = by_node[infos[placed[0][3]].node_id]
    of_slice = slices_of(hosts).get(first.slice_name or "", [first])
    whole = [(host.worker_id or 0, host.node_id, chip) for host in of_slice for chip in range(host.chips)]
    is_whole = [each[:3] for each in placed] == sorted(whole)
    if num_hosts > 1 and not is_whole:
        at = {info.host: by_node[info.node_id] for info in infos}
        where = ", ".join(f"{name} (slice {at[name].slice_name}, worker {at[name].worker_id})" for name in at)
        raise StartFailed(f"the trial's {len(placed)} chips are not one whole TPU slice: {where}")
    if is_undivided(first.pod_type) and not is_whole:
        raise StartFailed(
            f"a trial on TPU v7x must have all {len(whole)} chips of its slice, got {len(placed)}: set "
            "num_hosts and num_slots, or tpu_type"
        )
    ips = [infos[i].node_ip if num_hosts > 1 else "localhost" for *_, i in placed]
    addresses = tuple(f"{ip}:{FIRST_PORT + chip}" for ip, (*_, chip, _) in zip(ips, placed, strict=True))
    return TrialChips(tuple((i, chip) for *_, chip, i in placed), addresses, first, is_whole)
