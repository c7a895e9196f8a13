"""Finds what a build needs, or names what is missing with its cure, before anything is compiled."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from horovod_tune.horovod_build import BuildError
from horovod_tune.horovod_build.installed import InstalledTorch
from horovod_tune.horovod_build.plan import NcclPlace

OLDEST_CMAKE = (3, 13)


@dataclass(frozen=True)
class Machine:
    """What was found on this machine."""

    compiler: str | None
    make: str | None
    # A CMake that is new enough; None means that pip's is fetched for the build.
    cmake: str | None
    python_header: bool
    pip: bool
    nvcc: Path | None = None
    nvcc_release: str | None = None
    nccl: NcclPlace | None = None


def look_around(environ: Mapping[str, str]) -> Machine:
    """Return what this machine has."""
    nvcc = find_nvcc(environ)
    return Machine(
        compiler=find_compiler(environ),
        make=shutil.which("make"),
        cmake=find_cmake(environ),
        python_header=(Path(sysconfig.get_path("include")) / "Python.h").is_file(),
        pip=_runs([sys.executable, "-m", "pip", "--version"]) is not None,
        nvcc=nvcc,
        nvcc_release=None if nvcc is None else nvcc_release(_runs([str(nvcc), "--version"]) or ""),
        nccl=find_nccl(environ, [Path(entry) for entry in sys.path if entry]),
    )


def check(machine: Machine, torch: InstalledTorch, gpu: str) -> None:
    """Raise BuildError that lists all that is missing for a build with `gpu` operations."""
    missing = [*_missing_tools(machine), *(_missing_for_nccl(machine, torch) if gpu == "nccl" else ())]
    if missing:
        raise BuildError("Horovod cannot be compiled here:\n" + "\n".join(f"- {line}" for line in missing))


def _missing_tools(machine: Machine) -> list[str]:
    missing = []
    if machine.compiler is None:
        missing.append(
            "No C++ compiler (c++, g++ or clang++). "
            "Debian, Ubuntu: apt-get install g++. Fedora: dnf install gcc-c++."
        )
    if machine.make is None:
        missing.append("No make. Debian, Ubuntu: apt-get install make. Fedora: dnf install make.")
    if not machine.python_header:
        missing.append(
            f"Python's header file Python.h is not in {sysconfig.get_path('include')}. "
            "Debian, Ubuntu: apt-get install python3-dev. Fedora: dnf install python3-devel."
        )
    if not machine.pip:
        missing.append(f"{sys.executable} has no pip. Run: {sys.executable} -m ensurepip")
    return missing


def _missing_for_nccl(machine: Machine, torch: InstalledTorch) -> list[str]:
    missing = []
    if torch.cuda is None:
        missing.append(
            f"torch {torch.version} is not a CUDA build, so its tensors are never on a GPU. "
            "Install a CUDA build of torch first, or leave out --gpu nccl."
        )
    if machine.nvcc is None:
        missing.append(
            "No nvcc in $HOROVOD_CUDA_HOME, $CUDA_HOME, $PATH or /usr/local/cuda. "
            f"Install the CUDA toolkit{'' if torch.cuda is None else ' ' + torch.cuda}, "
            "or set HOROVOD_CUDA_HOME to where it is."
        )
    elif torch.cuda and machine.nvcc_release and _major(machine.nvcc_release) != _major(torch.cuda):
        missing.append(
            f"{machine.nvcc} is CUDA {machine.nvcc_release}, but torch {torch.version} was built for CUDA "
            f"{torch.cuda}. Set HOROVOD_CUDA_HOME to a CUDA {_major(torch.cuda)} toolkit."
        )
    if machine.nccl is None:
        missing.append(
            "No NCCL (nccl.h and libnccl) in $HOROVOD_NCCL_HOME, in torch's packages, in the CUDA toolkit "
            "or in the system. pip install nvidia-nccl-cu12 (the number as in torch's CUDA); Debian, Ubuntu "
            "with NVIDIA's packages: apt-get install libnccl-dev; or set HOROVOD_NCCL_HOME to where it is."
        )
    return missing


def _major(release: str) -> str:
    return release.split(".")[0]


def find_compiler(environ: Mapping[str, str]) -> str | None:
    """Return the C++ compiler that CMake will take: `$CXX`, else the first on the path."""
    named = environ.get("CXX", "").split()
    for name in (*named[:1], "c++", "g++", "clang++"):
        if found := shutil.which(name):
            return found
    return None


def find_cmake(environ: Mapping[str, str]) -> str | None:
    """Return a CMake that is new enough for Horovod: `$HOROVOD_CMAKE`, else the one on the path."""
    for name in (environ.get("HOROVOD_CMAKE"), "cmake"):
        found = shutil.which(name) if name else None
        if found and cmake_release(_runs([found, "--version"]) or "") >= OLDEST_CMAKE:
            return found
    return None


def cmake_release(version_output: str) -> tuple[int, int]:
    """Return the release that `cmake --version` states; (0, 0) where it states none.

    >>> cmake_release("cmake version 3.25.1")
    (3, 25)
    """
    found = re.search(r"cmake version (\d+)\.(\d+)", version_output)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def find_nvcc(environ: Mapping[str, str]) -> Path | None:
    """Return the CUDA compiler, in the order in which Horovod's own build looks for it."""
    homes = [environ[name] for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME") if environ.get(name)]
    for home in homes:
        nvcc = Path(home) / "bin" / "nvcc"
        if os.access(nvcc, os.X_OK):
            return nvcc
    if found := shutil.which("nvcc", path=environ.get("PATH")):
        return Path(found)
    nvcc = Path("/usr/local/cuda/bin/nvcc")
    return nvcc if os.access(nvcc, os.X_OK) else None


def nvcc_release(version_output: str) -> str | None:
    """Return the release that `nvcc --version` states.

    >>> nvcc_release("Cuda compilation tools, release 13.0, V13.0.48")
    '13.0'
    """
    found = re.search(r"release (\d+\.\d+)", version_output)
    return found[1] if found else None


def cuda_home_of(nvcc: Path, environ: Mapping[str, str]) -> Path:
    """Return the toolkit's folder: the one above nvcc, or the one that nvcc itself names.

    `nvcc` on the path may be a wrapper that lies outside its toolkit.
    """
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME"):
        if environ.get(name) and nvcc == Path(environ[name]) / "bin" / "nvcc":
            return Path(environ[name])
    dry_run = _runs([str(nvcc), "--dryrun", "-x", "cu", os.devnull], with_stderr=True) or ""
    named = re.search(r"^#\$ TOP=(.+)$", dry_run, re.MULTILINE)
    return Path(named[1].strip()).resolve() if named else nvcc.resolve().parent.parent


def find_nccl(environ: Mapping[str, str], packages: Sequence[Path]) -> NcclPlace | None:
    """Return NCCL's header and shared library.

    `$HOROVOD_NCCL_HOME` first, then the copy that CUDA builds of torch bring as a package (`packages` are the
    folders of installed packages), since that is the one loaded in a training process; then the toolkit's
    and the system's.
    """
    places: list[tuple[Path, Path]] = []
    if home := environ.get("HOROVOD_NCCL_HOME"):
        places += [(Path(home) / "include", Path(home) / lib) for lib in ("lib", "lib64")]
    places += [(entry / "nvidia/nccl/include", entry / "nvidia/nccl/lib") for entry in packages]
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME"):
        if home := environ.get(name):
            places += [(Path(home) / "include", Path(home) / lib) for lib in ("lib64", "lib")]
    places.append((Path("/usr/local/cuda/include"), Path("/usr/local/cuda/lib64")))
    system = [*sorted(Path("/usr/lib").glob("*-linux-gnu")), Path("/usr/lib64")]
    places += [(Path("/usr/include"), library) for library in system]
    for include, folder in places:
        if not (include / "nccl.h").is_file():
            continue
        for library in (folder / "libnccl.so", folder / "libnccl.so.2"):
            if library.exists():
                return NcclPlace(include, library)
    return None


def _runs(command: list[str], *, with_stderr: bool = False) -> str | None:
    """Return what a command prints, or None where it cannot be run or fails."""
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout + (ran.stderr if with_stderr else "")
