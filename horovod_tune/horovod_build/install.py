"""Builds Horovod for the torch that is installed, or takes the kept wheel, and installs it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from horovod_tune.horovod_build import BuildError, patches, plan, prerequisites
from horovod_tune.horovod_build.compiler import run_compiler, run_pip
from horovod_tune.horovod_build.installed import InstalledTorch, installed_horovod, installed_torch
from horovod_tune.horovod_build.patching import apply
from horovod_tune.horovod_build.wheel_cache import WheelCache, default_cache

# Runs in a process of its own: an import that crashes must not take the installer with it. The interface is
# named since a machine's own name may resolve to nothing.
_CHECK = """
import horovod.torch as hvd, torch
hvd.init()
assert hvd.allreduce(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]
print("gloo" if hvd.gloo_built() else "", "nccl" if hvd.nccl_built() else "")
"""


@dataclass(frozen=True)
class Request:
    """What the user asked for; see `horovod-tune install-horovod --help`."""

    gpu: str = "none"
    force: bool = False
    jobs: int | None = None
    cache: Path = field(default_factory=lambda: default_cache(os.environ))
    wheel_dir: Path | None = None
    install: bool = True
    source: Path | None = None


def install_horovod(request: Request) -> None:
    """Do what `request` says, with progress on stdout.

    Raises:
        BuildError: something is missing, a patch does not match, or the compiler fails.
    """
    torch = installed_torch()
    if torch is None:
        raise BuildError(
            f"There is no torch in {sys.prefix}. Horovod is compiled for the torch that is installed: "
            "install torch first."
        )
    machine = plan.machine_tag(_text("/proc/cpuinfo"))
    built = plan.Plan(torch_version=torch.version, gpu=request.gpu, machine=machine)
    if request.install and not request.force and request.wheel_dir is None and is_installed(built):
        _check_installed(built)
        return
    cache = WheelCache(request.cache)
    with cache.lock(built.key) as lock:
        wheel = None if request.force else cache.find(built.key)
        if wheel is None:
            wheel = _build(built, torch, request, cache, lock)
        else:
            print(f"Using the wheel compiled earlier: {wheel}")
        if request.wheel_dir is not None:
            request.wheel_dir.mkdir(parents=True, exist_ok=True)
            print(f"Wheel: {shutil.copy2(wheel, request.wheel_dir)}")
        if request.install:
            _install_wheel(wheel, built)


def is_installed(built: plan.Plan) -> bool:
    """Tell whether this environment has the Horovod that `built` would make."""
    present = installed_horovod()
    return present is not None and (present.version, present.torch_version) == (
        built.full_version,
        built.torch_version,
    )


def _build(built: plan.Plan, torch: InstalledTorch, request: Request, cache: WheelCache, lock: int) -> Path:
    machine = prerequisites.look_around(os.environ)
    prerequisites.check(machine, torch, request.gpu)
    work = cache.work_folder(built.key)
    cache.logs.mkdir(parents=True, exist_ok=True)
    log = cache.logs / f"{built.key}_{time.strftime('%Y%m%d-%H%M%S')}.log"
    _pip_install_missing(plan.BUILD_REQUIREMENTS)
    cmake = machine.cmake or _fetch_cmake(work / "cmake")
    if built.gpu == "nccl":
        built = _with_cuda(built, machine, work)
    print(f"Fetching Horovod {plan.HOROVOD_VERSION} ...", flush=True)
    source = _source(request.source, work)
    apply(patches.patches_for(torch.release, built.gpu), source)
    environment = plan.compile_environment(built, os.environ, jobs=request.jobs or _jobs(), cmake=cmake)
    made = work / "wheel"
    what = f"Compiling Horovod {built.full_version} for torch {torch.version}"
    run_compiler(plan.compile_command(sys.executable, source, made), environment, what, log, lock)
    wheels = list(made.glob("horovod-*.whl"))
    if len(wheels) != 1 or not _has_library(wheels[0]):
        made_of = ", ".join(wheel.name for wheel in wheels) or "no wheel"
        raise BuildError(f"The build ended well but its library is missing ({made_of}). Its log: {log}")
    kept = cache.keep(built.key, wheels[0])
    shutil.rmtree(work)
    log.unlink()
    return kept


def _has_library(wheel: Path) -> bool:
    with zipfile.ZipFile(wheel) as archive:
        return any(name.startswith("horovod/torch/mpi_lib_v2.") for name in archive.namelist())


def _source(archive: Path | None, work: Path) -> Path:
    if archive is None:
        folder = work / "archive"
        folder.mkdir()
        wanted = folder / "requirement.txt"
        wanted.write_text(plan.SOURCE_REQUIREMENT)
        run_pip(plan.download_command(sys.executable, wanted, folder))
        archive = next(iter(sorted(folder.glob("horovod-*.tar.gz"))), None)
    if archive is None or not archive.is_file():
        raise BuildError(
            f"No source archive of Horovod {plan.HOROVOD_VERSION} at {archive or 'the package index'}."
        )
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):  # Python 3.10.12, 3.11.4 and later.
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(work / "source")
    found = sorted((work / "source").glob("horovod-*/setup.py"))
    if len(found) != 1:
        raise BuildError(f"{archive} is not a source archive of Horovod: it has no horovod-*/setup.py.")
    return found[0].parent


def _with_cuda(built: plan.Plan, machine: prerequisites.Machine, work: Path) -> plan.Plan:
    """Add where CUDA and NCCL are. The linker wants `libnccl.so`; torch's package has only `libnccl.so.2`."""
    assert machine.nvcc is not None and machine.nccl is not None  # check() saw to it
    folder = work / "nccl"
    folder.mkdir()
    (folder / "libnccl.so").symlink_to(machine.nccl.library)
    return replace(
        built,
        cuda_home=prerequisites.cuda_home_of(machine.nvcc, os.environ),
        nccl=plan.NcclPlace(machine.nccl.include, folder / "libnccl.so"),
    )


def _install_wheel(wheel: Path, built: plan.Plan) -> None:
    run_pip([sys.executable, "-m", "pip", "install", "--no-deps", "--force-reinstall", str(wheel)])
    _pip_install_missing({name: plan.BUILD_REQUIREMENTS[name] for name in plan.RUN_REQUIREMENTS})
    _check_installed(built)


def _check_installed(built: plan.Plan) -> None:
    """Use it once: what is installed may still not load."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("HOROVOD_")}
    checked = subprocess.run(
        [sys.executable, "-c", _CHECK],
        env=environment | {"HOROVOD_GLOO_IFACE": "lo", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    if checked.returncode != 0 or "gloo" not in checked.stdout:
        # Horovod prints, to stdout, why it could not load its library, and goes on to fail elsewhere.
        said = [*checked.stdout.strip().splitlines()[:4], *checked.stderr.strip().splitlines()[-4:]]
        raise BuildError(
            f"Horovod {built.full_version} is installed but does not work "
            f"(exit status {checked.returncode}):\n"
            + "\n".join(said)
            + "\nCompile it anew: horovod-tune install-horovod --force"
        )
    operations = " and ".join(name for name in ("gloo", "nccl") if name in checked.stdout)
    print(f"Horovod {built.full_version} for torch {built.torch_version} is installed, with {operations}.")


def _pip_install_missing(requirements: dict[str, str]) -> None:
    importlib.invalidate_caches()
    missing = [wanted for module, wanted in requirements.items() if importlib.util.find_spec(module) is None]
    if missing:
        print(f"Installing {', '.join(missing)} ...", flush=True)
        run_pip([sys.executable, "-m", "pip", "install", *missing])


def _fetch_cmake(folder: Path) -> str:
    print("Fetching CMake (there is none on the path, or an old one) ...", flush=True)
    run_pip([sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(folder), "cmake"])
    # The program itself: the script beside it would look for the module where it is not.
    return str(folder / "cmake" / "data" / "bin" / "cmake")


def _jobs() -> int:
    return plan.jobs_that_fit(len(os.sched_getaffinity(0)), plan.available_memory(_text("/proc/meminfo")))


def _text(path: str) -> str:
    return Path(path).read_text() if Path(path).is_file() else ""
