"""Finds what a build needs, or names what is missing with its cure, before anything is compiled."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from horovod_tune.horovod_build import BuildError
from horovod_tune.horovod_build.installed import InstalledTorch

OLDEST_CMAKE = (3, 13)


@dataclass(frozen=True)
class Nccl:
    """NCCL's header folder and its shared library."""

    include: Path
    library: Path


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
    nccl: Nccl | None = None


def find_machine(environ: Mapping[str, str]) -> Machine:
    """Return what this machine has."""
    compilers = (*environ.get("CXX", "").split()[:1], "c++", "g++", "clang++")
    nvcc = find_nvcc(environ)
    release = (
        None if nvcc is None else re.search(r"release (\d+\.\d+)", output_of(str(nvcc), "--version") or "")
    )
    return Machine(
        compiler=next(filter(None, map(shutil.which, compilers)), None),
        make=shutil.which("make"),
        cmake=find_cmake(environ),
        python_header=(Path(sysconfig.get_path("include")) / "Python.h").is_file(),
        pip=output_of(sys.executable, "-m", "pip", "--version") is not None,
        nvcc=nvcc,
        nvcc_release=release[1] if release else None,
        nccl=find_nccl(environ, [Path(entry) for entry in sys.path if entry]),
    )


def check(machine: Machine, torch: InstalledTorch, gpu: str) -> None:
    """Raise BuildError that lists all that is missing for a build with `gpu` operations."""
    missing = [*_missing_tools(machine), *(_missing_for_nccl(machine, torch) if gpu == "nccl" else ())]
    if missing:
        raise BuildError("Horovod cannot be compiled here:\n" + "\n".join(f"- {line}" for line in missing))


def _missing_tools(machine: Machine) -> Iterator[str]:
    if machine.compiler is None:
        yield (
            "No C++ compiler (c++, g++ or clang++). "
            "Debian, Ubuntu: apt-get install g++. Fedora: dnf install gcc-c++."
        )
    if machine.make is None:
        yield "No make. Debian, Ubuntu: apt-get install make. Fedora: dnf install make."
    if not machine.python_header:
        yield (
            f"Python's header file Python.h is not in {sysconfig.get_path('include')}. "
            "Debian, Ubuntu: apt-get install python3-dev. Fedora: dnf install python3-devel."
        )
    if not machine.pip:
        yield f"{sys.executable} has no pip. Run: {sys.executable} -m ensurepip"


def _missing_for_nccl(machine: Machine, torch: InstalledTorch) -> Iterator[str]:
    def major(release: str) -> str:
        return release.split(".")[0]

    if torch.cuda is None:
        yield (
            f"torch {torch.version} is not a CUDA build, so its tensors are never on a GPU. "
            "Install a CUDA build of torch first, or leave out --gpu nccl."
        )
    if machine.nvcc is None:
        yield (
            "No nvcc in $HOROVOD_CUDA_HOME, $CUDA_HOME, $PATH or /usr/local/cuda. Install the CUDA toolkit"
            f"{'' if torch.cuda is None else ' ' + torch.cuda}, or set HOROVOD_CUDA_HOME to where it is."
        )
    elif torch.cuda and machine.nvcc_release and major(machine.nvcc_release) != major(torch.cuda):
        yield (
            f"{machine.nvcc} is CUDA {machine.nvcc_release}, but torch {torch.version} was built for CUDA "
            f"{torch.cuda}. Set HOROVOD_CUDA_HOME to a CUDA {major(torch.cuda)} toolkit."
        )
    if machine.nccl is None:
        yield (
            "No NCCL (nccl.h and libnccl) in $HOROVOD_NCCL_HOME, in torch's packages, in the CUDA toolkit "
            "or in the system. pip install nvidia-nccl-cu12 (the number as in torch's CUDA); Debian, Ubuntu "
            "with NVIDIA's packages: apt-get install libnccl-dev; or set HOROVOD_NCCL_HOME to where it is."
        )


def find_cmake(environ: Mapping[str, str]) -> str | None:
    """Return a CMake that is new enough for Horovod: `$HOROVOD_CMAKE`, else the one on the path."""
    for name in (environ.get("HOROVOD_CMAKE"), "cmake"):
        path = shutil.which(name) if name else None
        release = (
            re.search(r"cmake version (\d+)\.(\d+)", output_of(path, "--version") or "") if path else None
        )
        if release and (int(release[1]), int(release[2])) >= OLDEST_CMAKE:
            return path
    return None


def find_nvcc(environ: Mapping[str, str]) -> Path | None:
    """Return the CUDA compiler, in the order in which Horovod's own build looks for it."""
    homes = [Path(environ[name]) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME") if environ.get(name)]
    on_path = shutil.which("nvcc", path=environ.get("PATH"))
    candidates = [home / "bin" / "nvcc" for home in homes]
    candidates += [Path(on_path)] if on_path else []
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    return next((nvcc for nvcc in candidates if os.access(nvcc, os.X_OK)), None)


def cuda_home_of(nvcc: Path, environ: Mapping[str, str]) -> Path:
    """Return the toolkit's folder: the one above nvcc, or the one that nvcc itself names.

    `nvcc` on the path may be a wrapper outside its toolkit.
    """
    for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME"):
        if environ.get(name) and nvcc == Path(environ[name]) / "bin" / "nvcc":
            return Path(environ[name])
    named = re.search(r"^#\$ TOP=(.+)$", output_of(str(nvcc), "--dryrun", "-x", "cu", os.devnull) or "", re.M)
    return Path(named[1].strip()).resolve() if named else nvcc.resolve().parent.parent


def find_nccl(environ: Mapping[str, str], packages: Sequence[Path]) -> Nccl | None:
    """Return NCCL's header folder and shared library.

    `$HOROVOD_NCCL_HOME` first, then the copy that CUDA builds of torch bring as a package (`packages` are the
    folders of installed packages), since a training process loads that one; then the toolkit's and the
    system's.
    """
    homes = [environ["HOROVOD_NCCL_HOME"]] if environ.get("HOROVOD_NCCL_HOME") else []
    homes += [str(entry / "nvidia/nccl") for entry in packages]
    homes += [environ[name] for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME") if environ.get(name)]
    homes.append("/usr/local/cuda")
    places = [(Path(home) / "include", Path(home) / lib) for home in homes for lib in ("lib", "lib64")]
    system = [*sorted(Path("/usr/lib").glob("*-linux-gnu")), Path("/usr/lib64")]
    places += [(Path("/usr/include"), folder) for folder in system]
    for include, folder in places:
        for library in (folder / "libnccl.so", folder / "libnccl.so.2"):
            if (include / "nccl.h").is_file() and library.exists():
                return Nccl(include, library)
    return None


def output_of(*command: str) -> str | None:
    """Return what a command prints, or None if it cannot be run or fails."""
    try:
        ran = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout
