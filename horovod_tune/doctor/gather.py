"""Gathers the facts of the machine it runs on. Takes some seconds: each import is tried in a new process."""

from __future__ import annotations

import glob
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil

from horovod_tune.doctor.node_facts import HorovodFacts, NodeInfo, TorchFacts
from horovod_tune.horovod_build.installed import installed_horovod, installed_torch

IMPORT_TIMEOUT_S = 120.0

HIDES_GPUS = {("CUDA_VISIBLE_DEVICES", ""), ("HIP_VISIBLE_DEVICES", ""), ("ROCR_VISIBLE_DEVICES", "")}

GPU_DEVICES = ("/dev/nvidia[0-9]*", "/dev/kfd", "/dev/dxg")

# An import in this process would be final, and one that crashes would take the doctor with it.
_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
print(json.dumps({"cuda": torch.version.cuda, "gpus": gpus}))
"""
_HOROVOD = """
import json
import horovod.torch as hvd
built = {name: bool(getattr(hvd, name + "_built")()) for name in ("gloo", "nccl", "mpi")}
print(json.dumps(built))
"""
_IMPORT = "import {module}; print('{{}}')"

# Packages whose import is tried, and the module that trials use of them.
TRIED = {"ray": "ray.tune", "bayesian-optimization": "bayes_opt", "pandas": "pandas"}


def gather_facts() -> NodeInfo:
    """Return the facts of this machine and of the Python that runs this."""
    horovod, torch = installed_horovod(), installed_torch()
    packages, unmet = requirements()
    probes = {name: _IMPORT.format(module=module) for name, module in TRIED.items() if packages.get(name)}
    if torch is not None:
        probes["torch"] = _TORCH
    if horovod is not None:
        probes["horovod"] = _HOROVOD
    with ThreadPoolExecutor(max_workers=len(probes) or 1) as pool:
        said = dict(zip(probes, pool.map(probe, probes.values()), strict=True))
    slow = {name: answer.pop("slow_s") for name, answer in said.items() if "slow_s" in answer}
    shared = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    temporary = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return NodeInfo(
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        executable=sys.executable,
        cpus=len(os.sched_getaffinity(0)),
        memory=psutil.virtual_memory().total,
        packages=packages,
        unmet=unmet,
        broken={name: said[name]["error"] for name in TRIED if "error" in said.get(name, {})},
        slow=slow,
        torch=None if torch is None else TorchFacts(torch.version, **_tuples(said["torch"])),
        horovod=None
        if horovod is None
        else HorovodFacts(horovod.version, horovod.patch_level, horovod.torch_version, **said["horovod"]),
        gpu_devices=tuple(sorted(path for pattern in GPU_DEVICES for path in glob.glob(pattern))),
        host_addresses=host_addresses(),
        interfaces=interfaces(),
        temporary_folder=temporary,
        temporary_free=shutil.disk_usage(temporary).free,
        shared_memory=shared.total if shared else None,
        shared_memory_free=shared.free if shared else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
    )


def probe(program: str) -> dict[str, Any]:
    """Run `program`, which prints JSON last; return that, ``{"error": why}``, or ``{"slow_s": seconds}``."""
    # Ray hides the GPUs from tasks that ask for none, such as the one that gathers facts on a node.
    environment = {key: value for key, value in os.environ.items() if (key, value) not in HIDES_GPUS}
    try:
        ran = subprocess.run(
            [sys.executable, "-c", program],
            env=environment,
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return {"slow_s": IMPORT_TIMEOUT_S}
    if ran.returncode == 0:
        return dict(json.loads(ran.stdout.strip().splitlines()[-1]))
    return {"error": _why(ran.returncode, ran.stdout, ran.stderr)}


def _why(status: int, out: str, err: str) -> str:
    if status < 0:
        return f"the import was ended by signal {-status}"
    # Horovod prints why its library does not load, goes on, and fails over something else.
    printed = [line.strip() for line in out.splitlines() if line.strip()]
    raised = [line.strip() for line in err.splitlines() if line.strip()]
    return (printed or raised[-1:] or [f"exit status {status}"])[0]


def requirements() -> tuple[dict[str, str | None], tuple[str, ...]]:
    """Return the versions of what this package needs, and those needs that are not met."""
    from packaging.requirements import Requirement

    versions: dict[str, str | None] = {"horovod_tune": importlib.metadata.version("horovod_tune")}
    unmet = []
    for line in importlib.metadata.requires("horovod_tune") or ():
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        version = _version(wanted.name)
        versions[wanted.name] = version
        if version is None:
            unmet.append(f"{wanted} (not installed)")
        elif not wanted.specifier.contains(version, prereleases=True):
            unmet.append(f"{wanted} (installed: {version})")
    if (xla := _version("torch_xla")) is not None:
        versions["torch_xla"] = xla
    return versions, tuple(unmet)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def host_addresses() -> tuple[str, ...]:
    """Return what the host's own name resolves to; nothing where it does not resolve."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def interfaces() -> dict[str, tuple[str, ...]]:
    """Return the interfaces that are up with their IPv4 and IPv6 addresses."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: tuple(re.sub(r"%.*", "", entry.address) for entry in entries if entry.family in families)
        for name, entries in psutil.net_if_addrs().items()
        if name in up
    }


def _tuples(said: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in said.items()}
