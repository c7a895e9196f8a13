"""Runs in the driver, with an actor on each node: examines all nodes of a cluster in parallel."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from horovod_tune.doctor.findings import Node, diagnose_nodes
from horovod_tune.doctor.node_info import NodeInfo, collect_info
from horovod_tune.doctor.report import Report

DEFAULT_TIMEOUT_S = 180.0
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
    timeout_s: float = DEFAULT_TIMEOUT_S,
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
    nodes = _machines()
    if len(nodes) < 2:
        return Report()
    probes = _Probes(nodes, deadline=time.monotonic() + timeout_s)
    try:
        found = probes.examine(modules, nics)
    finally:
        probes.end()
    if backend is None:
        has_horovod = any(node.info is not None and node.info.horovod is not None for node in found)
        backend = "horovod" if has_horovod else "torch"
    return Report(tuple(found), tuple(diagnose_nodes(found, backend=backend)))


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


class _Probes:
    """One `NodeProbe` per machine, called in parallel until the deadline (monotonic, in seconds)."""

    def __init__(self, machines: Mapping[str, Mapping[str, Any]], *, deadline: float) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._deadline = deadline
        self._nodes = {label: Node(label, node["NodeManagerAddress"]) for label, node in machines.items()}
        actor: Any = ray.remote(num_cpus=0, max_restarts=0)(NodeProbe)
        self._actors: dict[str, Any] = {}
        for label, node in machines.items():
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            self._actors[label] = actor.options(scheduling_strategy=there).remote()

    def examine(self, modules: Sequence[str], nics: Sequence[str]) -> list[Node]:
        """Examine every machine; a machine that fails one check is left out of the later ones."""
        limit_s = self._left_s() / 2  # leaves time for the other checks if an import is slow
        infos = self._ask(lambda label, actor: actor.facts.remote(modules, limit_s))
        for label, info in infos.items():
            self._set(label, info=info, **_interface(info, self._nodes[label].address, nics))
        self._connect()
        return list(self._nodes.values())

    def end(self) -> None:
        import ray

        for actor in self._actors.values():
            ray.kill(actor)

    def _connect(self) -> None:
        own = {label: address for label, node in self._nodes.items() if (address := node.interface_address)}
        ports = self._ask(lambda label, actor: actor.listen.remote(own[label]), own)
        targets = {label: (own[label], port) for label, port in ports.items()}
        timeout_s = min(CONNECT_TIMEOUT_S, self._left_s())

        def connect(label: str, actor: Any) -> Any:
            others = {peer: target for peer, target in targets.items() if peer != label}
            return actor.unreached.remote(own[label], others, timeout_s)

        for label, unreached in self._ask(connect, targets).items():
            self._set(label, unreached=unreached)

    def _ask(
        self, question: Callable[[str, Any], Any], labels: Sequence[str] | Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the replies; a node that sent none is marked with the reason."""
        import ray

        asked = [label for label, node in self._nodes.items() if node.failure is None]
        asked = [label for label in asked if labels is None or label in labels]
        refs = {label: question(label, self._actors[label]) for label in asked}
        answers = {}
        for label, ref in refs.items():
            try:
                answers[label] = ray.get(ref, timeout=max(0.1, self._left_s()))
            except ray.exceptions.GetTimeoutError:
                self._set(label, info=None, failure="it did not respond in time")
            except ray.exceptions.RayError as error:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                self._set(label, info=None, failure=lines[-1] if lines else "it failed with no error message")
        return answers

    def _set(self, label: str, **changes: Any) -> None:
        self._nodes[label] = replace(self._nodes[label], **changes)

    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())


def _interface(info: NodeInfo, node_ip: str, nics: Sequence[str]) -> dict[str, Any]:
    """Return the interface that the ranks will choose, as fields of `Node`."""
    from horovod_tune.actors.ranks import choose_interface
    from horovod_tune.errors import StartFailed

    try:
        name = choose_interface(info.interfaces, node_ip=node_ip, nics=nics, single_host=False)
    except StartFailed as failure:
        return {"interface_failure": str(failure)}
    own = info.interfaces[name]
    address = node_ip if node_ip in own else next(ip for ip in own if "." in ip)
    return {"interface": name, "interface_address": address}
