"""Runs in the driver, with an actor on each node: examines all nodes of a cluster in parallel."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from horovod_tune.doctor.findings import Node, diagnose_nodes
from horovod_tune.doctor.node_info import NodeInfo, collect_info
from horovod_tune.doctor.report import Report

CONNECT_TIMEOUT_S = 5.0


class NodeProbe:
    """Examines one node. `check` runs it as a Ray actor that requests no resources."""

    def facts(self, modules: Sequence[str], timeout_s: float) -> NodeInfo:
        return collect_info(modules, timeout_s=timeout_s)

    def listen(self, address: str) -> int:
        """Listen on a free port of `address` until this process ends; return the port."""
        listener = socket.create_server((address, 0), backlog=1024)

        def accept() -> None:
            while True:
                listener.accept()[0].close()

        threading.Thread(target=accept, daemon=True, name="horovod-tune-preflight").start()
        return int(listener.getsockname()[1])

    def unreached(
        self, source: str, peers: Mapping[str, tuple[str, int]], timeout_s: float
    ) -> dict[str, str]:
        """Return, by label, why `peers` (address and port by label) could not be reached from `source`."""

        def reach(target: tuple[str, int]) -> str | None:
            try:
                socket.create_connection(target, timeout=timeout_s, source_address=(source, 0)).close()
            except OSError as error:
                return str(error)
            return None

        with ThreadPoolExecutor(max_workers=64) as pool:
            failures = dict(zip(peers, pool.map(reach, peers.values()), strict=True))
        return {label: why for label, why in failures.items() if why is not None}


def check(
    modules: Sequence[str],
    *,
    timeout_s: float = 180.0,
    nics: Sequence[str] = (),
    backend: str | None = None,
) -> Report:
    """Examine each machine of the Ray cluster that this process is connected to.

    Machines are distinguished by address: simulated nodes on one machine count once. A cluster of one
    machine gives an empty report, since its trials send nothing between hosts.

    Args:
        modules: the training function's modules. Each machine imports each of them in a new process.
        timeout_s: the limit for the whole check. A machine that does not respond within it is a problem.
        nics: as for `DistributedTrainableCreator`.
        backend: the `TrialSpec.backend_name` of a trial; only "horovod" needs Horovod. None: "horovod" if
            any machine has it.
    """
    machines = _machines()
    if len(machines) < 2:
        return Report()
    nodes = _examine(machines, modules, nics, deadline=time.monotonic() + timeout_s)
    if backend is None:
        has_horovod = any(node.info is not None and node.info.horovod is not None for node in nodes)
        backend = "horovod" if has_horovod else "torch"
    return Report(tuple(nodes), tuple(diagnose_nodes(nodes, backend=backend)))


def _machines() -> dict[str, Mapping[str, Any]]:
    """Return one alive Ray node per machine, by label, the driver's first."""
    import ray

    by_address: dict[str, Mapping[str, Any]] = {}
    for node in ray.nodes():
        if node["Alive"] and (node["Resources"].get("CPU") or node["Resources"].get("TPU")):
            by_address.setdefault(node["NodeManagerAddress"], node)
    here = ray.util.get_node_ip_address()
    nodes = sorted(by_address.items(), key=lambda item: (item[0] != here, item[1]["NodeManagerHostname"]))
    names = Counter(node["NodeManagerHostname"] for _, node in nodes)
    return {
        name if names[name := node["NodeManagerHostname"]] == 1 else f"{name} ({address})": node
        for address, node in nodes
    }


def _examine(
    machines: Mapping[str, Mapping[str, Any]], modules: Sequence[str], nics: Sequence[str], *, deadline: float
) -> list[Node]:
    """Examine the machines in parallel until the deadline (monotonic, in seconds).

    A machine that fails one check is left out of the later ones.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probe: Any = ray.remote(num_cpus=0, max_restarts=0)(NodeProbe)
    nodes = [Node(label, machine["NodeManagerAddress"]) for label, machine in machines.items()]
    actors = {}
    for label, machine in machines.items():
        pinned = NodeAffinitySchedulingStrategy(machine["NodeID"], soft=False)
        actors[label] = probe.options(scheduling_strategy=pinned).remote()

    def left_s() -> float:
        return max(0.0, deadline - time.monotonic())

    def replies(question: Callable[[Node, Any], Any], asked: Sequence[Node]) -> Iterator[tuple[Node, Any]]:
        """Ask all, then yield the replies; a node that sends none is marked with the reason."""
        for node, ref in [(node, question(node, actors[node.label])) for node in asked]:
            try:
                yield node, ray.get(ref, timeout=max(0.1, left_s()))
            except ray.exceptions.GetTimeoutError:
                node.info, node.failure = None, "it did not respond in time"
            except ray.exceptions.RayError as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                node.info, node.failure = None, lines[-1] if lines else "it failed with no error message"

    try:
        limit_s = left_s() / 2  # leaves time for the other checks if an import is slow
        for node, info in replies(lambda node, actor: actor.facts.remote(modules, limit_s), nodes):
            node.info = info
            _choose_interface(node, info, nics)
        listening = [node for node in nodes if node.interface_address]
        ports = replies(lambda node, actor: actor.listen.remote(node.interface_address), listening)
        targets = {node.label: (str(node.interface_address), port) for node, port in ports}
        timeout_s = min(CONNECT_TIMEOUT_S, left_s())

        def connect(node: Node, actor: Any) -> Any:
            others = {label: target for label, target in targets.items() if label != node.label}
            return actor.unreached.remote(node.interface_address, others, timeout_s)

        for node, unreached in replies(connect, [node for node in nodes if node.label in targets]):
            node.unreached = unreached
    finally:
        for actor in actors.values():
            ray.kill(actor)
    return nodes


def _choose_interface(node: Node, info: NodeInfo, nics: Sequence[str]) -> None:
    """Set the interface that the ranks will choose."""
    from horovod_tune.actors.ranks import choose_interface
    from horovod_tune.errors import StartFailed

    try:
        name = choose_interface(info.interfaces, node_ip=node.address, nics=nics, single_host=False)
    except StartFailed as failure:
        node.interface_failure = str(failure)
        return
    own = info.interfaces[name]
    node.interface = name
    node.interface_address = node.address if node.address in own else next(ip for ip in own if "." in ip)
