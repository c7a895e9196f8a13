"""The machine and the versions that the figures were measured with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

PACKAGES = ("horovod_tune", "ray", "torch", "horovod", "numpy", "cloudpickle", "tensorboardX")


def describe() -> dict[str, str]:
    """Return the properties of the machine and the versions of the packages, by name."""
    cpu = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), ""
    )
    memory = next(
        (int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0
    )
    return {
        "CPU": f"{cpu or platform.processor()}, {len(os.sched_getaffinity(0))} cores for this process",
        "memory": f"{memory / 2**20:.0f} GiB",
        "load before": f"{os.getloadavg()[0]:.1f} runnable processes in the minute before",
        "system": f"{platform.system()} {platform.release()}",
        "commit": _commit(),
        "Python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def _commit() -> str:
    words = ("git", "describe", "--always", "--abbrev=8", "--exclude=*", "--dirty")
    found = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if os.path.exists(path) else []


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
