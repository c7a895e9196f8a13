"""What is built: the wheel's name in the cache, the compiler's environment and the commands. Pure."""

from __future__ import annotations

import os
import platform
import re
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from horovod_tune.horovod_build.patches import PATCH_LEVEL

# The newest release, and the one that the patches are written for.
HOROVOD_VERSION = "0.28.1"

# A line of a requirements file. What is compiled is what was looked at: the checksum is that of the archive
# on the package index.
SOURCE_REQUIREMENT = (
    f"horovod=={HOROVOD_VERSION} "
    "--hash=sha256:92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
)

GPU_CHOICES = ("none", "nccl")

# Modules that Horovod's setup and its compiled part import, and how pip calls them.
BUILD_REQUIREMENTS = {
    "setuptools": "setuptools",
    "wheel": "wheel",
    "cloudpickle": "cloudpickle",
    "psutil": "psutil",
    "yaml": "pyyaml",
    "packaging": "packaging",
    "cffi": "cffi>=1.4",
    "numpy": "numpy",
}

# Those of them that Horovod needs when it runs.
RUN_REQUIREMENTS = ("cloudpickle", "psutil", "yaml", "packaging", "cffi", "numpy")

_ARCHITECTURE_FLAGS = ("avx", "f16c", "fma")


@dataclass(frozen=True)
class NcclPlace:
    """Where NCCL's header and its shared library were found."""

    include: Path
    library: Path


@dataclass(frozen=True)
class Plan:
    """One build of Horovod: everything that makes its wheel differ from another's."""

    torch_version: str
    gpu: str = "none"
    python: str = f"{sys.implementation.cache_tag}"
    machine: str = "unknown"
    cuda_home: Path | None = None
    nccl: NcclPlace | None = None

    @property
    def local_version(self) -> str:
        """What Horovod's version carries after its plus sign, so that `pip list` shows what was built.

        >>> Plan("2.13.0+cu128", gpu="nccl").local_version.split(".")[-1]
        'nccl'
        """
        return f"{PATCH_LEVEL}.{'cpu' if self.gpu == 'none' else self.gpu}"

    @property
    def full_version(self) -> str:
        """Horovod's version as `pip list` shows it after the build."""
        return f"{HOROVOD_VERSION}+{self.local_version}"

    @property
    def key(self) -> str:
        """The folder of this build's wheel in the cache.

        >>> Plan("2.13.0+cpu", python="cpython-311", machine="linux-x86_64").key.split("_", 1)[1]
        'torch-2.13.0+cpu_cpython-311_linux-x86_64'
        """
        return f"horovod-{self.full_version}_torch-{self.torch_version}_{self.python}_{self.machine}"


def machine_tag(cpuinfo: str = "") -> str:
    """Return what a compiled wheel depends on beside Python and torch.

    Horovod compiles with the AVX, F16C and FMA instructions of the machine that builds it (on x86-64), so a
    home directory shared with an older machine must not hand that machine the same wheel.

    >>> machine_tag("flags : fpu avx f16c fma avx2").split("-")[-1]
    'avx.f16c.fma'
    """
    libc, release = platform.libc_ver()
    flags: set[str] = set()
    for line in cpuinfo.splitlines():
        if line.startswith("flags"):
            flags = set(line.split(":", 1)[1].split())
            break
    instructions = ".".join(flag for flag in _ARCHITECTURE_FLAGS if flag in flags) or "baseline"
    return f"{sysconfig.get_platform()}-{libc or 'libc'}{release}-{instructions}"


def compile_environment(plan: Plan, environ: Mapping[str, str], *, jobs: int, cmake: str) -> dict[str, str]:
    """Return the environment in which Horovod's setup runs.

    The user's own HOROVOD_ variables that say *what* to build are dropped: the plan says it, and the wheel
    is kept under the plan's name. Those that say where something lies or how to compile stay.
    """
    what = ("HOROVOD_WITH", "HOROVOD_GPU", "HOROVOD_CPU_OPERATIONS", "HOROVOD_SKIP_COMPILE", "HOROVOD_DEBUG")
    kept = {name: value for name, value in environ.items() if not name.startswith(what)}
    kept.pop("CMAKE_GENERATOR", None)  # Horovod passes make's own options to whatever the generator is.
    kept |= {
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_CMAKE": cmake,
        "HOROVOD_LOCAL_VERSION": plan.local_version,
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses Gloo's older one; older CMakes ignore it.
        "MAKEFLAGS": f"-j{jobs}",
    }
    if plan.gpu == "nccl":
        kept["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        # Shared, as torch uses it: then both have one copy of NCCL in the process.
        kept.setdefault("HOROVOD_NCCL_LINK", "SHARED")
        if plan.cuda_home is not None:
            kept |= {"HOROVOD_CUDA_HOME": str(plan.cuda_home), "CUDA_HOME": str(plan.cuda_home)}
            kept["PATH"] = f"{plan.cuda_home / 'bin'}{os.pathsep}{kept.get('PATH', os.defpath)}"
        if plan.nccl is not None:
            kept["HOROVOD_NCCL_INCLUDE"] = str(plan.nccl.include)
            kept["HOROVOD_NCCL_LIB"] = str(plan.nccl.library.parent)
    return kept


def download_command(python: str, requirements: Path, folder: Path) -> list[str]:
    """Return the command that fetches the source archive that `requirements` names into `folder`."""
    return [
        *(python, "-m", "pip", "download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod"),
        *("--dest", str(folder), "--requirement", str(requirements)),
    ]


def compile_command(python: str, source: Path, folder: Path) -> list[str]:
    """Return the command that compiles `source` into a wheel in `folder`.

    Without build isolation: an isolated build would compile against a torch that pip fetches for itself,
    not against the one that is installed.
    """
    return [
        *(python, "-m", "pip", "wheel", "--verbose", "--no-build-isolation", "--no-deps", "--no-cache-dir"),
        *("--wheel-dir", str(folder), str(source)),
    ]


def jobs_that_fit(cpus: int, memory_bytes: int) -> int:
    """Return how many compilers may run at once: one a CPU, and 1.5 GB of memory for each.

    >>> jobs_that_fit(8, 4_000_000_000)
    2
    >>> jobs_that_fit(2, 500_000_000)
    1
    """
    return max(1, min(cpus, memory_bytes // 1_500_000_000))


def available_memory(meminfo: str) -> int:
    """Return the bytes of memory that Linux says a new program may take; 0 where it does not say.

    >>> available_memory("MemTotal: 8000 kB\\nMemAvailable:    2000 kB")
    2048000
    """
    found = re.search(r"^MemAvailable:\s*(\d+) kB", meminfo, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
