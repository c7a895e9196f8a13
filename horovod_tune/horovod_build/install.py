"""Builds Horovod for the installed torch, or takes the wheel kept from an earlier build, and installs it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from horovod_tune.horovod_build import BuildError, build, installed, patches
from horovod_tune.horovod_build.build import Plan, apply, run_pip
from horovod_tune.horovod_build.installed import (
    InstalledHorovod,
    InstalledTorch,
    installed_horovod,
    installed_torch,
)

# How long the test collective of an installed Horovod may take, the import of torch included.
CHECK_TIMEOUT_S = 300
# A build's folder that is older than this was left by a build that was killed.
LONGEST_BUILD_S = 86_400

# Modules that Horovod's setup and its compiled part import, with their names for pip.
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

# Runs in its own process: an import that crashes must not end the installer. The interface is named because
# a machine's own name may not resolve.
_CHECK = """
import horovod.torch as hvd, torch
hvd.init()
assert hvd.allreduce(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
print("gloo" if hvd.gloo_built() else "", "nccl" if hvd.nccl_built() else "")
"""


def default_cache(environ: Mapping[str, str]) -> Path:
    """Return the cache directory: ``$XDG_CACHE_HOME/horovod_tune``, or ``~/.cache/horovod_tune``."""
    base = environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is invalid and must be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "horovod_tune"


@dataclass(frozen=True)
class Request:
    """The user's options; see `horovod-tune install-horovod --help`."""

    gpu: str = "none"
    force: bool = False
    jobs: int | None = None
    cache: Path = field(default_factory=lambda: default_cache(os.environ))
    wheel_dir: Path | None = None
    install: bool = True
    source: Path | None = None


def install_horovod(request: Request) -> None:
    """Install Horovod as `request` describes, with progress on stdout.

    Raises:
        BuildError: Something is missing, a patch does not match, or the compiler fails.
    """
    torch = installed_torch()
    if torch is None:
        cure = "Horovod is compiled for the installed torch: install torch first."
        raise BuildError(f"There is no torch in {sys.prefix}. {cure}")
    machine = build.machine_tag(Path("/proc/cpuinfo").read_text())
    chips = os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST", "") if request.gpu == "nccl" else ""
    plan = Plan(torch.version, gpu=request.gpu, machine=machine, cuda_chips=chips)
    present = installed_horovod()
    # An installed Horovod does not state its chips.
    is_installed = present == InstalledHorovod(plan.full_version, plan.torch_version) and not chips
    if request.install and not request.force and request.wheel_dir is None and is_installed:
        _check_installed(plan)
        return
    kept = sorted((request.cache / "wheels" / plan.key).glob("horovod-*.whl"))
    if kept and not request.force:
        wheel = kept[-1]
        print(f"Using the wheel compiled earlier: {wheel}")
    else:
        building = request.cache / "building"
        building.mkdir(parents=True, exist_ok=True)
        for leftover in building.iterdir():  # of builds that were killed
            with suppress(FileNotFoundError):  # another build has just ended
                if time.time() - leftover.stat().st_mtime > LONGEST_BUILD_S:
                    shutil.rmtree(leftover, ignore_errors=True)
        # One folder per build: two may run at the same time, also on hosts that share the cache.
        with tempfile.TemporaryDirectory(prefix=f"{plan.key}_", dir=building) as work:
            wheel = _build(plan, torch, request, Path(work))
    if request.wheel_dir is not None:
        request.wheel_dir.mkdir(parents=True, exist_ok=True)
        print(f"Wheel: {shutil.copy2(wheel, request.wheel_dir)}")
    if request.install:
        run_pip("install", "--no-deps", "--force-reinstall", str(wheel))
        _pip_install_missing(without=("setuptools", "wheel"))
        _check_installed(plan)


def _build(plan: Plan, torch: InstalledTorch, request: Request, work: Path) -> Path:
    tools = installed.find_tools(torch, request.gpu, os.environ)
    logs = request.cache / "logs"
    logs.mkdir(exist_ok=True)
    log = logs / f"{work.name}_{time.strftime('%Y%m%d-%H%M%S')}.log"
    _pip_install_missing()
    cmake = tools.cmake or build.fetch_cmake(work / "cmake")
    if tools.nccl is not None:
        # The linker looks for `libnccl.so`, but torch's package has only `libnccl.so.2`.
        library = work / "libnccl.so"
        library.symlink_to(tools.nccl.library)
        tools = replace(tools, nccl=replace(tools.nccl, library=library))
    print(f"Fetching Horovod {build.HOROVOD_VERSION} ...", flush=True)
    source = build.fetch_source(request.source, work)
    apply(patches.patches_for(torch.release, plan.gpu), source)
    jobs = request.jobs or build.max_jobs()
    environment = build.compile_environment(plan, os.environ, jobs=jobs, cmake=cmake, tools=tools)
    # Horovod's log lines begin with the source file: make its path short, since this folder is temporary.
    environment["CXXFLAGS"] = f"{environment.get('CXXFLAGS', '')} -ffile-prefix-map={source}/=".strip()
    what = f"Compiling Horovod {plan.full_version} for torch {torch.version}"
    build.compile_wheel(source, work / "wheel", environment, what, log)
    wheels = list((work / "wheel").glob("horovod-*.whl"))
    files = [name for wheel in wheels for name in zipfile.ZipFile(wheel).namelist()]
    if len(wheels) != 1 or not any(name.startswith("horovod/torch/mpi_lib_v2.") for name in files):
        raise BuildError(f"The build succeeded but made no wheel with Horovod's library. Its log: {log}")
    kept = request.cache / "wheels" / plan.key / wheels[0].name
    kept.parent.mkdir(parents=True, exist_ok=True)
    os.replace(wheels[0], kept)
    log.unlink()
    return kept


def _check_installed(plan: Plan) -> None:
    """Run one collective: an installed Horovod may still fail to load."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HOROVOD_")}
    try:
        checked = subprocess.run(
            [sys.executable, "-c", _CHECK],
            env=environment | {"HOROVOD_GLOO_IFACE": "lo", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=CHECK_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired as error:
        raise BuildError(
            f"Horovod {plan.full_version} is installed, but a collective did not end in {CHECK_TIMEOUT_S} s."
        ) from error
    if checked.returncode != 0 or "gloo" not in checked.stdout:
        # Horovod prints to stdout why it could not load its library, and fails elsewhere afterwards.
        output = [*checked.stdout.strip().splitlines()[:4], *checked.stderr.strip().splitlines()[-4:]]
        raise BuildError(
            f"Horovod {plan.full_version} is installed but does not work "
            f"(exit status {checked.returncode}):\n"
            + "\n".join(output)
            + "\nCompile it again: the same command with --force"
        )
    operations = " and ".join(name for name in ("gloo", "nccl") if name in checked.stdout)
    print(f"Horovod {plan.full_version} for torch {plan.torch_version} is installed, with {operations}.")


def _pip_install_missing(without: tuple[str, ...] = ()) -> None:
    importlib.invalidate_caches()
    names = {module: name for module, name in BUILD_REQUIREMENTS.items() if module not in without}
    missing = [name for module, name in names.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"Installing {', '.join(missing)} ...", flush=True)
        run_pip("install", *missing)
