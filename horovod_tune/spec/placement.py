"""The placement of a trial's workers: its bundles, and the check that a cluster can hold them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horovod_tune.errors import ResourcesUnavailable


@dataclass(frozen=True)
class Placement:
    """Bundles of a Ray placement group (resource name to amount), and its strategy."""

    bundles: tuple[dict[str, float], ...]
    strategy: str


def check_fits(placement: Placement, nodes: Sequence[dict[str, float]]) -> None:
    """Raise ResourcesUnavailable if nodes with these total resources can never hold the trial's bundles.

    ``nodes`` are the total (not the free) resources of the cluster's nodes: a trial that fits but finds
    the nodes busy waits its turn.

    >>> check_fits(Placement(({"CPU": 2.0},), "PACK"), [{"CPU": 4.0}])
    """
    if fits(placement, nodes):
        return
    count, asked = len(placement.bundles), amounts(placement.bundles[0])
    if count > 1:
        asked = f"{count} x {asked}"
        asked += " on different machines" if placement.strategy == "STRICT_SPREAD" else ""
    names = {name for each in placement.bundles for name in each}
    on_nodes = "; ".join(amounts({name: node.get(name, 0.0) for name in names}) for node in nodes)
    raise ResourcesUnavailable(
        f"a trial requests {asked}, which this cluster can never provide: its {len(nodes)} node(s) have "
        f"{on_nodes}. "
        "Lower num_slots, num_hosts or num_cpus_per_slot, or start Ray with more resources."
    )


def fits(placement: Placement, nodes: Sequence[dict[str, float]]) -> bool:
    """Return True if nodes with these resources can hold all bundles of a trial.

    >>> fits(Placement(({"CPU": 2.0},) * 2, "STRICT_SPREAD"), [{"CPU": 4.0}, {"CPU": 1.0}])
    False
    """
    room = [dict(node) for node in nodes]
    for bundle in sorted(placement.bundles, key=lambda each: -sum(each.values())):
        node = next((node for node in room if _holds(node, bundle)), None)
        if node is None:
            return False
        if placement.strategy == "STRICT_SPREAD":
            room.remove(node)
        for name, amount in bundle.items():
            node[name] = node.get(name, 0.0) - amount
    return True


def fits_one_node(placement: Placement, nodes: Sequence[dict[str, float]]) -> bool:
    """Return True if a trial may fit on one node, so that its workers send nothing between nodes.

    >>> fits_one_node(Placement(({"CPU": 2.0},) * 3, "PACK"), [{"CPU": 4.0}, {"CPU": 4.0}])
    False
    """
    if placement.strategy == "STRICT_SPREAD":
        return False
    names = {name for bundle in placement.bundles for name in bundle}
    total = {name: sum(bundle.get(name, 0.0) for bundle in placement.bundles) for name in names}
    return any(_holds(node, total) for node in nodes)


def _holds(node: dict[str, float], resources: dict[str, float]) -> bool:
    # Ray counts in units of 1/10000.
    return all(node.get(name, 0.0) > amount - 5e-5 for name, amount in resources.items())


def amounts(resources: Mapping[str, float]) -> str:
    """Return resources as text.

    >>> amounts({"GPU": 1.0, "CPU": 0.5})
    '0.5 CPU, 1 GPU'
    """
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items()))
