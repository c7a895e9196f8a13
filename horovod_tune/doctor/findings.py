"""Finds problems of a machine, or between the nodes of a cluster, with their cures. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from horovod_tune.doctor.node_info import NodeInfo
from horovod_tune.horovod_build.installed import UNHIDE
from horovod_tune.horovod_build.patches import PATCH_LEVEL

INSTALL = "horovod-tune install-horovod"
_WITH_EXTRAS = {"ray": "ray[tune]"}


@dataclass(frozen=True)
class Finding:
    """One problem or warning."""

    # A trial cannot run with a problem; with a warning it runs, but with a drawback.
    level: Literal["problem", "warning"]
    subject: str  # the line of the doctor's table that it belongs to
    what: str
    cure: str
    node: str = ""  # the node that has the problem; empty for this machine


@dataclass
class Node:
    """One node of the cluster, as it was examined."""

    label: str  # its host name, with its address if two nodes have the same name
    address: str  # Ray's address for it
    info: NodeInfo | None = None  # None if examining it failed, with the reason in `failure`
    failure: str | None = None
    # The interface that the ranks' collectives will use, with its address, or why there is none.
    interface: str | None = None
    interface_address: str | None = None
    interface_failure: str | None = None
    # The nodes that accepted no connection from this one, and why.
    unreached: dict[str, str] = field(default_factory=dict)


def can_run_trials(findings: Iterable[Finding]) -> bool:
    """Return True if a trial can run in spite of `findings`."""
    return all(finding.level != "problem" for finding in findings)


def diagnose(info: NodeInfo) -> list[Finding]:
    """Return what is wrong with a machine, problems first."""
    findings = [*_packages(info), *_torch(info), *_horovod(info)]
    if not info.shadows:
        return _sorted(findings)
    # What is hidden may be why others fail: its cure comes first, and is the only one for its package.
    hidden = [
        problem(name, f"Python imports {file} instead of the installed {name}.", UNHIDE)
        for name, file in info.shadows.items()
    ]
    others = [finding for finding in findings if finding.subject not in info.shadows]
    later = f"See to {', '.join(info.shadows)} first: this may come from it."
    return _sorted([*hidden, *(replace(o, cure=later) if o.level == "problem" else o for o in others)])


def diagnose_nodes(nodes: Sequence[Node], *, backend: str = "horovod") -> list[Finding]:
    """Return what is wrong with these nodes for a trial across them, problems first.

    The first node is the driver's: its version counts as the right one if no version is more common.
    """
    of_nodes = [
        replace(finding, node=node.label)
        for node in nodes
        for finding in (_failed(node) if node.info is None else _of_node(node, node.info, backend))
    ]
    infos = {node.label: node.info for node in nodes if node.info is not None}
    return _sorted([*of_nodes, *_versions(infos, backend), *_reach(nodes)])


def _sorted(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: finding.level != "problem")


def problem(subject: str, what: str, cure: str, node: str = "") -> Finding:
    return Finding("problem", subject, what, cure, node)


def warning(subject: str, what: str, cure: str) -> Finding:
    return Finding("warning", subject, what, cure)


# --- One machine --------------------------------------------------------------------------------------------


def _packages(info: NodeInfo) -> Iterator[Finding]:
    for line in info.unmet:
        name = line.split("[")[0].split(" ")[0].rstrip("<>=!~,.0123456789")
        if name != "torch" or info.torch is not None:  # _torch reports a missing torch
            yield problem(name, f"horovod_tune needs {line}.", f"pip install '{line.split(' (')[0]}'")
    for name, why in info.broken.items():
        cure = "Install it there, or ship it: ray.init(runtime_env={'py_modules': [...]})"
        if name not in info.modules:
            # As after `pip install ray`, without its extra.
            is_lacking = "No module named" in why or "dependencies are missing" in why
            cure = f"pip install '{_WITH_EXTRAS.get(name, name)}'"
            cure = cure if is_lacking else f"pip install --force-reinstall {name}"
        yield problem(name, f"{name} cannot be imported: {why}", cure)
    for name, seconds in info.slow.items():
        what = f"The import of {name} takes more than {seconds:.0f} s; it may still work."
        yield warning(name, what, "Check the load of the machine and the file system that holds its Python.")


def _torch(info: NodeInfo) -> Iterator[Finding]:
    if (torch := info.torch) is None:
        yield problem("torch", "torch is not installed.", f"pip install torch, then {INSTALL}")
    elif torch.error is not None:
        cure = f"pip install --force-reinstall torch, then {INSTALL}"
        yield problem("torch", f"torch {torch.version} cannot be imported: {torch.error}", cure)


def _horovod(info: NodeInfo) -> Iterator[Finding]:
    horovod, torch = info.horovod, info.torch
    if horovod is None:
        what = 'Horovod is not installed: trials need backend="torch" (or a TPU).'
        yield warning("horovod", what, INSTALL)
        return
    built_for, install = horovod.torch_version, _install(horovod.version)
    if torch is not None and built_for not in (None, torch.version):
        what = f"compiled for torch {built_for}, but torch {torch.version} is installed."
        yield problem("horovod", f"Horovod {horovod.version} was {what}", install)
    elif horovod.error is not None:
        what = f"Horovod {horovod.version} cannot be imported: {horovod.error}"
        yield problem("horovod", what, f"{install} --force")
    elif "horovod" in info.slow:
        return
    elif not horovod.gloo:
        yield problem("horovod", "Horovod is built without Gloo.", install)
    else:
        if torch and torch.gpus and not horovod.nccl:
            what = f"There is a GPU ({torch.gpus[0]}), but Horovod is built without NCCL"
            yield warning("horovod", f"{what}: no collectives for CUDA tensors.", f"{INSTALL} --gpu nccl")
        if horovod.patch_level != PATCH_LEVEL:
            what = (
                f"Horovod {horovod.version} lacks patches of {INSTALL} (it has "
                f"{horovod.patch_level or 'none'}; newest: {PATCH_LEVEL}): it may start slowly, use another "
                "network interface than configured, fail where a host's name resolves to a loopback address, "
                "wait for a lost rank forever, or be aborted by an unauthenticated client of its ports."
            )
            yield warning("horovod", what, install)


def _install(version: str) -> str:
    """Return the command that builds a Horovod such as this version."""
    return f"{INSTALL} --gpu nccl" if version.endswith(".nccl") else INSTALL


# --- The nodes of a cluster ---------------------------------------------------------------------------------


def _failed(node: Node) -> Iterator[Finding]:
    why = node.failure or "it did not respond"
    if "No module named 'horovod_tune'" in why:
        yield problem("horovod_tune", "horovod_tune is not installed.", "Install it there as on the others.")
    else:
        cure = f"Check Ray's log on {node.label}, and with `ray status` that the machine is up."
        yield problem("node", f"It could not be examined: {why}", cure)


def _of_node(node: Node, info: NodeInfo, backend: str) -> Iterator[Finding]:
    needs_horovod = backend == "horovod"
    for finding in diagnose(info):
        if finding.subject != "horovod":
            yield finding
        elif needs_horovod:
            yield finding if info.horovod else replace(finding, level="problem")
    if ":" in node.address:
        what = f"Ray's address for it is {node.address}; trials on several hosts support only IPv4."
        cure = "Start Ray there with --node-ip-address and an IPv4 address."
        yield problem("interface", what, f"{cure} Hosts without one cannot take part.")
    elif node.interface_failure is not None:
        yield problem("interface", node.interface_failure, "Name an interface that each node has: nics=[...]")
    elif (node.interface_address or "").startswith("127."):
        what = f"Ray's address for it is {node.interface_address}, which no other machine can reach."
        cure = "Start Ray there with --node-ip-address and the address of its network interface."
        yield problem("interface", what, cure)


def _versions(infos: dict[str, NodeInfo], backend: str) -> Iterator[Finding]:
    """Compare versions; `diagnose` reports missing packages."""
    compared: dict[str, Callable[[NodeInfo], str | None]] = {
        "Python": lambda info: ".".join(info.python.split(".")[:2]),
        "torch": lambda info: info.torch.version.split("+")[0] if info.torch else None,
        "horovod_tune": lambda info: info.packages.get("horovod_tune"),
        "Horovod": lambda info: info.horovod.version if info.horovod and backend == "horovod" else None,
    }
    for name, version_of in compared.items():
        versions = {node: version for node, info in infos.items() if (version := version_of(info))}
        for usual, _ in Counter(versions.values()).most_common(1):  # on a tie, the driver's
            others = " ".join(node for node, version in versions.items() if version == usual)
            cure = f"Install {name} {usual} there" + (f", then {INSTALL}." if name == "torch" else ".")
            for node, version in versions.items():
                if version != usual:
                    what = f"It has {name} {version}; {others} have {usual}."
                    yield problem(name, what, _install(usual) if name == "Horovod" else cure, node)


def _reach(nodes: Sequence[Node]) -> Iterator[Finding]:
    """Report the nodes that most others do not reach: one that is cut off reaches none itself."""
    refused = {node.label: [other for other in nodes if node.label in other.unreached] for node in nodes}
    most = max(map(len, refused.values()), default=0)
    for node in nodes:
        if most and len(by := refused[node.label]) == most:
            labels = " ".join(other.label for other in by)
            place = f"{node.interface_address} ({node.interface})"
            what = f"It cannot be reached from {labels} at {place}: {by[0].unreached[node.label]}."
            cure = "Open all TCP ports between the nodes (Gloo uses any of them), or name another interface"
            yield problem("interface", what, f"{cure}: nics=[...]", node.label)
