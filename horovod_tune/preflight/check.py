"""Runs in the driver: asks every machine of the cluster at once, within a time limit, and judges."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from horovod_tune.preflight.judge import MachineLook, judge
from horovod_tune.preflight.look import Look
from horovod_tune.preflight.preflight_report import PreflightReport

DEFAULT_TIMEOUT_S = 180.0
CONNECT_TIMEOUT_S = 5.0
MODULE_NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")


def check(
    func_module_names: Sequence[str],
    *,
    num_hosts: int,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    nics: Sequence[str] = (),
    use_tpu: bool = False,
) -> PreflightReport:
    """Look at each machine of the Ray cluster that this process is connected to.

    Machines are told apart by their address: simulated nodes on one machine count once, and a cluster of one
    machine gives an empty report at once, as does ``num_hosts`` below 2, for nothing goes between hosts then.

    Args:
        func_module_names: modules that the training function needs; imported on each machine, in a process
            of its own.
        num_hosts: on how many hosts a trial runs.
        timeout_s: an end for the whole look, in seconds. A machine that has not answered by
            then is a problem.
        nics: as for `DistributedTrainableCreator`.
        use_tpu: the trial goes through torch_xla, so Horovod is not looked for.

    Raises:
        ValueError: a module's name is not one.
    """
    for name in func_module_names:
        if not MODULE_NAME.fullmatch(name):
            raise ValueError(f"func_module_names must be dotted module names, got {name!r}")
    start = time.monotonic()
    machines = _machines() if num_hosts > 1 else {}
    if len(machines) < 2:
        return PreflightReport((), ())
    watch = _Watch(machines, deadline=start + timeout_s)
    try:
        looks = watch.look(func_module_names, nics)
    finally:
        watch.end()
    return PreflightReport(tuple(looks), judge(looks, use_tpu=use_tpu), time.monotonic() - start)


def _machines() -> dict[str, dict[str, Any]]:
    """Return one alive node by machine label, the driver's first."""
    import ray

    by_address: dict[str, dict[str, Any]] = {}
    for node in ray.nodes():
        if node["Alive"] and (node["Resources"].get("CPU") or node["Resources"].get("TPU")):
            by_address.setdefault(node["NodeManagerAddress"], node)
    here = ray.util.get_node_ip_address()
    nodes = sorted(
        by_address.values(),
        key=lambda node: (node["NodeManagerAddress"] != here, node["NodeManagerHostname"]),
    )
    return {label: node for label, node in zip(_labels(nodes), nodes, strict=True)}


def _labels(nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name each machine by its host name, with the address where two share it.

    >>> _labels([{"NodeManagerHostname": h, "NodeManagerAddress": a} for h, a in ["a1", "b2", "b3"]])
    ['a', 'b (2)', 'b (3)']
    """
    counts = Counter(node["NodeManagerHostname"] for node in nodes)
    return [
        node["NodeManagerHostname"]
        if counts[node["NodeManagerHostname"]] == 1
        else f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        for node in nodes
    ]


class _Watch:
    """One `Look` actor on each machine, asked in parallel until the deadline (monotonic, in seconds)."""

    def __init__(self, machines: Mapping[str, Mapping[str, Any]], *, deadline: float) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._deadline = deadline
        self._looks = {
            label: MachineLook(label, node["NodeManagerAddress"]) for label, node in machines.items()
        }
        actor: Any = ray.remote(num_cpus=0, max_restarts=0)(Look)
        self._actors: dict[str, Any] = {
            label: actor.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote()
            for label, node in machines.items()
        }

    def look(self, modules: Sequence[str], nics: Sequence[str]) -> list[MachineLook]:
        """Ask everything there is to ask; a machine that fails once is not asked again."""
        self._compare_clocks()
        facts = self._ask(lambda actor, _: actor.facts.remote())
        # Half of the time, so that a slow import leaves some for the rest.
        limit_s = self._left() / 2
        imports = self._ask(lambda actor, _: actor.imports.remote(list(modules), limit_s))
        for label, found in self._answers(facts).items():
            self._set(label, facts=found, **_interface(found, self._looks[label].address, nics))
        for label, (failed, slow) in self._answers(imports).items():
            self._set(label, failed_imports=failed, slow_imports=slow)
        self._try_connections()
        return list(self._looks.values())

    def end(self) -> None:
        """End the actors."""
        import ray

        for actor in self._actors.values():
            ray.kill(actor)

    def _compare_clocks(self) -> None:
        # One at a time and twice: the first answer of an actor contains its start.
        self._answers(self._ask(lambda actor, _: actor.clock_s.remote()))
        for label in self._sound():
            asked = time.time()
            answer = self._answers({label: self._actors[label].clock_s.remote()}).get(label)
            error = (time.time() - asked) / 2
            if answer is not None:
                self._set(label, clock_ahead_s=answer - (asked + error), clock_error_s=error)

    def _try_connections(self) -> None:
        asked = {label for label in self._sound() if self._looks[label].interface_address is not None}
        ports = self._answers(
            self._ask(lambda actor, label: actor.listen.remote(self._looks[label].interface_address), asked)
        )
        targets = {label: (self._looks[label].interface_address, port) for label, port in ports.items()}
        timeout_s = min(CONNECT_TIMEOUT_S, self._left())
        refs = self._ask(
            lambda actor, label: actor.unreached.remote(
                targets[label][0],
                {peer: target for peer, target in targets.items() if peer != label},
                timeout_s,
            ),
            set(targets),
        )
        for label, unreached in self._answers(refs).items():
            self._set(label, unreached=unreached)

    def _sound(self) -> list[str]:
        return [label for label, look in self._looks.items() if look.failure is None]

    def _ask(self, question: Callable[[Any, str], Any], labels: set[str] | None = None) -> dict[str, Any]:
        return {
            label: question(self._actors[label], label)
            for label in self._sound()
            if labels is None or label in labels
        }

    def _answers(self, refs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answers that came; who gave none is marked with why."""
        import ray

        answers = {}
        for label, ref in refs.items():
            if self._looks[label].failure is not None:
                continue
            try:
                answers[label] = ray.get(ref, timeout=max(0.1, self._left()))
            except ray.exceptions.GetTimeoutError:
                self._set(label, facts=None, failure="it gave no answer in time")
            except ray.exceptions.RayError as error:
                self._set(label, facts=None, failure=_last_line(str(error)))
        return answers

    def _set(self, label: str, **changes: Any) -> None:
        self._looks[label] = replace(self._looks[label], **changes)

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())


def _interface(facts: Any, node_ip: str, nics: Sequence[str]) -> dict[str, Any]:
    """Choose the interface as the ranks will."""
    from horovod_tune.errors import StartFailed
    from horovod_tune.gloo.ranks import choose_interface

    try:
        name = choose_interface(facts.interfaces, node_ip=node_ip, nics=nics, single_host=False)
    except StartFailed as failure:
        return {"interface_failure": str(failure)}
    own = facts.interfaces[name]
    address = node_ip if node_ip in own else next((ip for ip in own if ":" not in ip), None)
    if address is None:
        return {"interface_failure": f"its interface {name} has no IPv4 address"}
    return {"interface": name, "interface_address": address}


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it failed with no error message"
