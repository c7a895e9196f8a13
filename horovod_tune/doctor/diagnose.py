"""Finds out from a machine's facts what is wrong with it, with the cure. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from horovod_tune.doctor.node_facts import HorovodFacts, NodeInfo
from horovod_tune.horovod_build.patches import PATCH_LEVEL

GIB = 1024**3
LEAST_FREE_DISK = 1 * GIB
# Ray's object store takes this part of the memory, in /dev/shm (`ray.init`, `object_store_memory`).
RAY_OBJECT_STORE_SHARE = 0.3
LEAST_OPEN_FILES = 4096

INSTALL = "horovod-tune install-horovod"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    # A trial cannot run with a problem; with a warning it can, though not everything goes well.
    level: Literal["problem", "warning"]
    # The line of the doctor's screen that it belongs to.
    subject: str
    what: str
    cure: str


def can_run_trials(findings: Iterable[Finding]) -> bool:
    """Tell whether a trial can run in spite of `findings`."""
    return all(finding.level != "problem" for finding in findings)


def diagnose(facts: NodeInfo) -> list[Finding]:
    """Return what is wrong with a machine, problems first."""
    found = [
        *_packages(facts),
        *_torch(facts),
        *_horovod(facts),
        *_host_name(facts),
        *_room(facts),
    ]
    return sorted(found, key=lambda finding: finding.level != "problem")


def _packages(facts: NodeInfo) -> Iterator[Finding]:
    for line in facts.unmet:
        name = line.split("[")[0].split(" ")[0].rstrip("<>=!~,.0123456789")
        if name == "torch" and facts.torch is None:
            continue  # said by _torch
        yield Finding("problem", name, f"This package needs {line}.", f"pip install '{line.split(' (')[0]}'")
    for name, why in facts.broken.items():
        yield Finding(
            "problem", name, f"{name} cannot be imported: {why}", f"pip install --force-reinstall {name}"
        )
    for name, seconds in facts.slow.items():
        yield Finding(
            "warning",
            name,
            f"The import of {name} had not ended after {seconds:.0f} s: slow, not known to be broken.",
            "Look at the machine's load, and at how fast the file system of its Python is.",
        )


def _torch(facts: NodeInfo) -> Iterator[Finding]:
    torch = facts.torch
    if torch is None:
        yield Finding("problem", "torch", "torch is not installed.", "pip install torch, then " + INSTALL)
    elif torch.error is not None:
        yield Finding(
            "problem",
            "torch",
            f"torch {torch.version} cannot be imported: {torch.error}",
            f"pip install --force-reinstall torch, then {INSTALL}",
        )
    elif "torch" in facts.slow:
        return  # said by _packages
    elif facts.gpu_devices and torch.cuda is None and "torch_xla" not in facts.packages:
        yield Finding(
            "warning",
            "torch",
            f"This machine has a GPU ({facts.gpu_devices[0]}), but torch {torch.version} is a CPU build.",
            f"For trials with use_gpu=True: install a CUDA build of torch, then {INSTALL} --gpu nccl",
        )
    elif facts.gpu_devices and not torch.gpus and torch.cuda is not None:
        yield Finding(
            "warning",
            "torch",
            f"This machine has a GPU ({facts.gpu_devices[0]}), but torch sees none.",
            f"Look at nvidia-smi: the driver must be new enough for CUDA {torch.cuda}.",
        )


def _horovod(facts: NodeInfo) -> Iterator[Finding]:
    horovod = facts.horovod
    if horovod is None:
        # TPU trials go through torch_xla alone.
        level: Literal["problem", "warning"] = "warning" if facts.packages.get("torch_xla") else "problem"
        yield Finding(level, "horovod", "Horovod is not installed.", INSTALL)
        return
    torch_version = facts.torch.version if facts.torch else None
    if torch_version is not None and horovod.built_for_torch not in (None, torch_version):
        yield Finding(
            "problem",
            "horovod",
            f"Horovod {horovod.version} was compiled for torch {horovod.built_for_torch}; "
            f"installed is torch {torch_version}.",
            INSTALL,
        )
    elif horovod.error is not None:
        yield Finding(
            "problem",
            "horovod",
            f"Horovod {horovod.version} cannot be imported: {horovod.error}",
            f"{INSTALL} --force",
        )
    elif "horovod" in facts.slow:
        return  # said by _packages
    elif not horovod.gloo:
        yield Finding("problem", "horovod", "Horovod is built without Gloo.", INSTALL)
    else:
        yield from _horovod_that_runs(facts, horovod)


def _horovod_that_runs(facts: NodeInfo, horovod: HorovodFacts) -> Iterator[Finding]:
    gpus = facts.torch.gpus if facts.torch else ()
    if gpus and not horovod.nccl:
        yield Finding(
            "warning",
            "horovod",
            f"There is a GPU ({gpus[0]}), but Horovod is built without NCCL: it has no collectives for "
            "CUDA tensors.",
            f"{INSTALL} --gpu nccl",
        )
    if horovod.patch_level != PATCH_LEVEL:
        has = "none" if horovod.patch_level is None else horovod.patch_level
        yield Finding(
            "warning",
            "horovod",
            f"Horovod {horovod.version} lacks patches of {INSTALL} (it has {has}; newest: {PATCH_LEVEL}): it "
            "may start slowly, use another network interface than configured, wait for a lost rank "
            "forever, or be ended by a stranger who connects to its ports.",
            INSTALL,
        )


def _host_name(facts: NodeInfo) -> Iterator[Finding]:
    if facts.horovod is None or facts.horovod.patch_level is not None:
        return  # A patched Horovod uses the configured interface and looks up no name.
    if not facts.host_addresses:
        yield Finding(
            "problem",
            "host name",
            f"The host's name, {facts.host}, resolves to no address. Unpatched, Horovod takes its address "
            "from it and aborts.",
            f"{INSTALL}, or add a line for {facts.host} to /etc/hosts",
        )
        return
    own = {address for addresses in facts.interfaces.values() for address in addresses}
    foreign = [address for address in facts.host_addresses if not is_loopback(address) and address not in own]
    if foreign and len(foreign) == len(facts.host_addresses):
        yield Finding(
            "problem",
            "host name",
            f"The host's name, {facts.host}, resolves to {foreign[0]}, which is on none of its interfaces. "
            "Unpatched, Horovod takes its address from it.",
            f"{INSTALL}, or correct the line for {facts.host} in /etc/hosts",
        )
    elif is_loopback(facts.host_addresses[0]):
        yield Finding(
            "warning",
            "host name",
            f"The host's name, {facts.host}, resolves to {facts.host_addresses[0]}, which other hosts cannot "
            "reach. Unpatched, Horovod takes its address from it: trials on several hosts fail.",
            f"{INSTALL}, or put the host's own address into its line in /etc/hosts",
        )


def _room(facts: NodeInfo) -> Iterator[Finding]:
    if facts.temporary_free < LEAST_FREE_DISK:
        yield Finding(
            "warning",
            "disk",
            f"{facts.temporary_folder} has {facts.temporary_free / GIB:.1f} GiB left; Ray keeps its logs "
            "there, and what does not fit into memory.",
            "Make room, or set RAY_TMPDIR to a folder with more (a short path: Ray's sockets are in it).",
        )
    wanted = int(facts.memory * RAY_OBJECT_STORE_SHARE)
    room = wanted // GIB + 1
    if facts.shared_memory is None or facts.shared_memory < wanted:
        size = "missing" if facts.shared_memory is None else f"{facts.shared_memory / GIB:.1f} GiB"
        yield Finding(
            "warning",
            "shared memory",
            f"/dev/shm is {size}; Ray's object store needs {wanted / GIB:.1f} GiB and uses the disk instead.",
            f"In Docker: --shm-size={room}g. Elsewhere, as root: mount -o remount,size={room}G /dev/shm",
        )
    if 0 <= facts.open_files < LEAST_OPEN_FILES:
        yield Finding(
            "warning",
            "open files",
            f"A process may have {facts.open_files} files open; Ray needs thousands.",
            "Raise nofile in /etc/security/limits.conf, or ulimit -Hn 65536 as root.",
        )


def is_loopback(address: str) -> bool:
    """Tell whether an address is one that only its own host reaches.

    >>> is_loopback("127.0.1.1"), is_loopback("::1"), is_loopback("10.0.0.3")
    (True, True, False)
    """
    return ipaddress.ip_address(address.split("%")[0]).is_loopback
