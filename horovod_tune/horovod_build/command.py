"""`horovod-tune install-horovod`: builds Horovod for the installed torch, or takes a cached wheel."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from horovod_tune.horovod_build import BuildError, build, installed, patches
from horovod_tune.horovod_build.build import GPU_CHOICES, HOROVOD_VERSION, run_pip
from horovod_tune.horovod_build.installed import InstalledHorovod, InstalledTorch

if TYPE_CHECKING:
    from argparse import _SubParsersAction

# How long the test collective of an installed Horovod may take, the import of torch included.
CHECK_TIMEOUT_S = 300
# A build's folder that is older than this was left by a build that was killed.
LONGEST_BUILD_S = 86_400

# Modules that Horovod's setup imports, and those that its compiled part imports.
SETUP_MODULES = ("setuptools", "wheel")
MODULES = ("cloudpickle", "psutil", "yaml", "packaging", "cffi", "numpy")

_COLLECTIVE = """import horovod.torch as hvd, torch
hvd.init()
assert hvd.allreduce(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]"""


def add_parsers(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `horovod-tune`."""
    parser = subparsers.add_parser(
        "install-horovod",
        help="compile Horovod for the installed torch and install it",
        description=f"Compiles Horovod {HOROVOD_VERSION} with Gloo for the torch of this environment and "
        "installs it. The wheel is cached for these versions of Horovod, torch, Python and the platform: "
        "another environment installs it in seconds. Needs a C++ compiler, make and Python's header files.",
    )
    option = parser.add_argument
    gpu = "nccl: collectives of CUDA tensors run on the GPU through NCCL; needs nvcc (default: none)"
    option("--gpu", choices=GPU_CHOICES, default="none", help=gpu)
    option("--force", action="store_true", help="compile again, even if Horovod is installed")
    jobs = "number of compilers that run at once (default: the most that CPUs and memory allow)"
    option("--jobs", "-j", type=_at_least_one, metavar="N", help=jobs)
    cache = "where wheels and the logs of failed builds are kept (default: ~/.cache/horovod_tune)"
    option("--cache-dir", dest="cache", type=Path, default=default_cache(), metavar="DIR", help=cache)
    option("--wheel-dir", type=Path, metavar="DIR", help="put a copy of the wheel into DIR")
    option("--no-install", dest="install", action="store_false", help="build the wheel, do not install it")
    source = "Horovod's source archive, for hosts without internet"
    option("--source", type=Path, metavar="FILE", help=source)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    # An exception, so that a build that is ended also ends its compilers and removes its folder.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        install_horovod(arguments)
    except BuildError as error:
        print(f"horovod-tune install-horovod: {error}", file=sys.stderr)
        return 1
    return 0


def install_horovod(options: argparse.Namespace) -> None:
    """Install Horovod as the command's options say, with progress on stdout, or raise BuildError."""
    cache = options.cache.absolute()
    torch = installed.installed_torch()
    if torch is None:
        cure = "Horovod is compiled for the installed torch: install torch first."
        raise BuildError(f"There is no torch in {sys.prefix}. {cure}")
    chips = os.environ.get("HOROVOD_BUILD_CUDA_CC_LIST", "") if options.gpu == "nccl" else ""
    machine = build.machine_tag(Path("/proc/cpuinfo").read_text())
    key = build.wheel_key(torch.version, options.gpu, machine, chips)
    wanted = InstalledHorovod(build.built_version(options.gpu), torch.version)
    is_installed = installed.installed_horovod() == wanted and not chips  # it does not state its chips
    if options.install and not options.force and options.wheel_dir is None and is_installed:
        _check_installed(wanted)
        return
    wheels = cache / "wheels" / key
    kept = sorted(wheels.glob("horovod-*.whl"))
    if kept and not options.force:
        wheel = kept[-1]
        print(f"Using the wheel compiled earlier: {wheel}")
    else:
        building = cache / "building"
        building.mkdir(parents=True, exist_ok=True)
        for leftover in building.iterdir():  # of builds that were killed
            with suppress(FileNotFoundError):  # another build has just ended
                if time.time() - leftover.stat().st_mtime > LONGEST_BUILD_S:
                    shutil.rmtree(leftover, ignore_errors=True)
        # One folder per build: two may run at the same time, also on hosts that share the cache.
        with tempfile.TemporaryDirectory(prefix=f"{key}_", dir=building) as work:
            wheel = _build(torch, options, Path(work), cache / "logs", wheels)
    if options.wheel_dir is not None:
        options.wheel_dir.mkdir(parents=True, exist_ok=True)
        print(f"Wheel: {shutil.copy2(wheel, options.wheel_dir)}")
    if options.install:
        run_pip("install", "--no-deps", "--force-reinstall", str(wheel))
        _pip_install_missing(MODULES)
        _check_installed(wanted)


def _build(torch: InstalledTorch, options: argparse.Namespace, work: Path, logs: Path, wheels: Path) -> Path:
    """Compile a wheel in the folder `work` and move it into `wheels`; return its path."""
    tools = installed.find_tools(torch, options.gpu, os.environ, work)
    logs.mkdir(exist_ok=True)
    log = logs / f"{work.name}_{time.strftime('%Y%m%d-%H%M%S')}.log"
    _pip_install_missing(SETUP_MODULES + MODULES)
    if "HOROVOD_CMAKE" not in tools:
        tools["HOROVOD_CMAKE"] = build.fetch_cmake(work / "cmake")
    print(f"Fetching Horovod {HOROVOD_VERSION} ...", flush=True)
    source = build.fetch_source(options.source, work)
    build.apply(patches.patches_for(torch.release, options.gpu), source)
    jobs = options.jobs or build.max_jobs()
    environment = build.compile_environment(options.gpu, os.environ, jobs=jobs, tools=tools)
    # Horovod's log lines begin with the source file: make its path short, since this folder is temporary.
    environment["CXXFLAGS"] = f"{environment.get('CXXFLAGS', '')} -ffile-prefix-map={source}/=".strip()
    what = f"Compiling Horovod {build.built_version(options.gpu)} for torch {torch.version}"
    build.compile_wheel(source, work / "wheel", environment, what, log)
    made = list((work / "wheel").glob("horovod-*.whl"))
    files = [name for wheel in made for name in zipfile.ZipFile(wheel).namelist()]
    if len(made) != 1 or not any(name.startswith("horovod/torch/mpi_lib_v2.") for name in files):
        raise BuildError(f"The build succeeded but made no wheel with Horovod's library. Its log: {log}")
    wheels.mkdir(parents=True, exist_ok=True)
    kept = made[0].replace(wheels / made[0].name)
    log.unlink()
    return kept


def _check_installed(built: InstalledHorovod) -> None:
    """Run one collective: an installed Horovod may still fail to load."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HOROVOD_")}
    # The interface is named because a machine's own name may not resolve.
    environ |= {"HOROVOD_GLOO_IFACE": "lo", "OMP_NUM_THREADS": "1"}
    facts = installed.probe(_COLLECTIVE, installed.HOROVOD_FACTS, CHECK_TIMEOUT_S, environ)
    if "slow_s" in facts:
        raise BuildError(
            f"Horovod {built.version} is installed, but a collective did not end in {CHECK_TIMEOUT_S} s."
        )
    if not facts.get("gloo"):
        cure = "Compile it again: the same command with --force"
        if file := installed.hiding_file("horovod"):
            cure = f"Python imports {file} instead. {installed.UNHIDE}"
        why = facts.get("error", "it lacks Gloo")
        raise BuildError(f"Horovod {built.version} is installed but does not work: {why}\n{cure}")
    operations = "gloo and nccl" if facts["nccl"] else "gloo"
    print(f"Horovod {built.version} for torch {built.torch_version} is installed, with {operations}.")


def _pip_install_missing(modules: tuple[str, ...]) -> None:
    importlib.invalidate_caches()
    missing = ["pyyaml" if name == "yaml" else name for name in modules if not importlib.util.find_spec(name)]
    if missing:
        print(f"Installing {', '.join(missing)} ...", flush=True)
        run_pip("install", *missing)


def default_cache() -> Path:
    """Return the cache directory: ``$XDG_CACHE_HOME/horovod_tune``, or ``~/.cache/horovod_tune``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is invalid and must be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "horovod_tune"


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(
            f"the number of compilers must be an integer of at least 1, got {text}"
        )
    return int(text)
