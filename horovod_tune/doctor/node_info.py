"""The state of one machine, as plain data that is sent between nodes, and the function that collects it.

Collecting takes some seconds: each import is tried in a new process, since it cannot be undone, and one that
crashes would end this process.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from horovod_tune.horovod_build.installed import (
    HOROVOD_FACTS,
    IMPORT_TIMEOUT_S,
    InstalledHorovod,
    InstalledTorch,
    hiding_file,
    imported_file,
    installed_horovod,
    installed_torch,
    probe,
)

# By package: what a process imports, and an expression for a dict of facts about it.
PROBES = {
    "torch": (
        "import torch",
        "{'gpus': [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]}",
    ),
    "horovod": ("import horovod.torch as hvd", HOROVOD_FACTS),
    "ray": ("import ray.tune", "{}"),
    "bayesian-optimization": ("import bayes_opt", "{}"),
    "pandas": ("import pandas", "{}"),
}


@dataclass(frozen=True)
class NodeInfo:
    """One machine and the Python environment that was examined."""

    host: str
    python: str
    executable: str
    # Versions of this package's own requirements; None for one that is missing.
    packages: dict[str, str | None]
    unmet: tuple[str, ...] = ()  # requirements of this package that the installed packages do not meet
    # Packages, and modules of a training function, that cannot be imported, and why.
    broken: dict[str, str] = field(default_factory=dict)
    # Those whose import had not ended after this many seconds: nothing more is known about them.
    slow: dict[str, float] = field(default_factory=dict)
    # If an import failed: by package that is installed, another file that its import finds.
    shadows: dict[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()  # the modules of the training function that were tried
    torch: InstalledTorch | None = None
    horovod: InstalledHorovod | None = None
    # The addresses of the network interfaces that are up.
    interfaces: dict[str, tuple[str, ...]] = field(default_factory=dict)


def collect_info(modules: Sequence[str] = (), *, timeout_s: float = IMPORT_TIMEOUT_S) -> NodeInfo:
    """Examine this machine and its running Python; import its packages and `modules`, within `timeout_s`."""
    end = time.monotonic() + timeout_s
    horovod, torch = installed_horovod(), installed_torch()
    packages, unmet = requirements()
    libraries = {"torch": torch, "horovod": horovod}
    probes = {name: program for name, program in PROBES.items() if libraries.get(name) or packages.get(name)}
    for name in modules:
        probes.setdefault(name, (f"import importlib; importlib.import_module({name!r})", "{}"))
    with ThreadPoolExecutor(max_workers=8) as pool:
        replies = pool.map(lambda each: probe(each[0], each[1], end - time.monotonic()), probes.values())
        answers = dict(zip(probes, replies, strict=True))
    slow = {name: answer.pop("slow_s") for name, answer in answers.items() if "slow_s" in answer}
    for name in PROBES.keys() & answers.keys():
        file = imported_file(PROBES[name][0].split()[1].split(".")[0])
        if "error" in answers[name] and file is not None:
            answers[name]["error"] += f" (imported from {file})"
    lost = [name for name, library in libraries.items() if library is None and _version(name) is not None]
    failed = lost or any("error" in answer for answer in answers.values())
    names = [*packages, "horovod"] if failed else []
    of_torch = answers.get("torch", {})
    of_torch["gpus"] = tuple(of_torch.get("gpus", ()))
    return NodeInfo(
        host=socket.gethostname(),
        python=platform.python_version(),
        executable=sys.executable,
        packages=packages,
        unmet=unmet,
        broken={name: a["error"] for name, a in answers.items() if "error" in a and name not in libraries},
        slow=slow,
        shadows={name: str(file) for name in names if (file := hiding_file(name))},
        modules=tuple(modules),
        torch=replace(torch, **of_torch) if torch else None,
        horovod=replace(horovod, **answers["horovod"]) if horovod else None,
        interfaces=_interfaces(),
    )


def _interfaces() -> dict[str, tuple[str, ...]]:
    try:
        from horovod_tune.actors.ranks import interfaces

        return interfaces()
    except (ImportError, AttributeError):  # psutil is missing or hidden, which is a finding
        return {}


def requirements() -> tuple[dict[str, str | None], tuple[str, ...]]:
    """Return the versions of this package's requirements, and those requirements that are not met."""
    versions: dict[str, str | None] = {"horovod_tune": _version("horovod_tune")}
    unmet = []
    # A copy of the package that was not installed (PYTHONPATH, py_modules) has no metadata.
    lines = importlib.metadata.requires("horovod_tune") if versions["horovod_tune"] is not None else None
    for line in lines or ():
        wanted, _, marker = (part.strip() for part in line.partition(";"))
        name = re.split(r"[^\w.-]", wanted)[0]
        if "extra ==" in marker:  # there are no other markers
            continue
        version = versions[name] = _version(name)
        if version is None:
            unmet.append(f"{wanted} (not installed)")
        elif not _meets(version, line):
            unmet.append(f"{wanted} (installed: {version})")
    found = {name: _version(name) for name in ("torch_xla", "torch_tpu")}
    versions |= {name: version for name, version in found.items() if version is not None}
    return versions, tuple(unmet)


def _meets(version: str, requirement: str) -> bool:
    try:
        from packaging.requirements import Requirement
    except ImportError:  # it is missing or hidden, which is a finding
        return True
    return Requirement(requirement).specifier.contains(version, prereleases=True)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
