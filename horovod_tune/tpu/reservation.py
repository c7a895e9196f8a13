"""Runs in the driver and the coordinator: the hosts that a TPU trial reserves in Ray."""

from __future__ import annotations

from collections.abc import Sequence

import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from horovod_tune.messages import WorkerInfo
from horovod_tune.spec.placement import Placement
from horovod_tune.spec.trial_spec import TrialSpec
from horovod_tune.tpu import slices
from horovod_tune.tpu.chips import TrialChips, chips_of


def tpu_hosts() -> list[slices.TpuHost]:
    """Return the TPU resources of the cluster's live nodes."""
    return [slices.host_of(node) for node in ray.nodes() if node["Alive"]]


def placement(spec: TrialSpec) -> Placement:
    """Return the bundles of a TPU trial on the cluster as it is now."""
    return slices.tpu_placement(spec, tpu_hosts() if ray.is_initialized() else [])


class Reservation:
    """The hosts of a trial. ``placement_group`` has a bundle for a host, or for the first host of a slice."""

    def __init__(self, spec: TrialSpec, placement_group: PlacementGroup) -> None:
        self._spec, self._group = spec, placement_group
        self._rest: PlacementGroup | None = None
        self.chips_per_host = int(placement_group.bundle_specs[0].get("TPU", 0))
        # Once `find_chips` has found them.
        self.chips: TrialChips | None = None

    def bundles(self) -> list[tuple[PlacementGroup, int]]:
        """Return each host's bundle. Ray releases those of a slice's other hosts with this process."""
        bundles = [(self._group, index) for index in range(self._group.bundle_count)]
        has_head = any(name.endswith("-head") for name in self._group.bundle_specs[0])
        if has_head and self._spec.num_hosts != 1:
            head = placement_group_table(self._group)["bundles_to_node_id"][0]
            rest = slices.rest_of_slice(self._spec, head, tpu_hosts())
            self._rest = ray.util.placement_group(rest, strategy="STRICT_SPREAD")
            bundles += [(self._rest, index) for index in range(self._rest.bundle_count)]
        return bundles

    def find_chips(self, infos: Sequence[WorkerInfo]) -> TrialChips:
        """Return the chips that Ray has given the workers; raises StartFailed as `chips_of`."""
        self.chips = chips_of(infos, tpu_hosts(), num_hosts=self._spec.num_hosts or 1)
        return self.chips

    def close(self) -> None:
        if self._rest is not None:
            remove_placement_group(self._rest)
            self._rest = None
