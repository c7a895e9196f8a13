"""Builds Horovod's wheel: source, patches, `pip wheel`, progress, the first error of a failed build.

Each text that a patch replaces must occur exactly once in its file. Otherwise the source is not the version
that the patches were written for, which is an error: a build without its patches would fail later or, worse,
run and misbehave.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from horovod_tune.horovod_build import BuildError
from horovod_tune.horovod_build.patches import PATCH_LEVEL

# The newest release, and the one that the patches were written for.
HOROVOD_VERSION = "0.28.1"

# A line of a requirements file; the checksum is that of the archive on the package index.
SOURCE_REQUIREMENT = (
    f"horovod=={HOROVOD_VERSION} "
    "--hash=sha256:92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
)

GPU_CHOICES = ("none", "nccl")

# The log shows the cause first; make, CMake, setuptools and pip then only report that a command failed.
_ERROR = re.compile(
    r"^CMake Error"
    r"|\b(fatal )?error:(?! subprocess-exited| command )"
    r"|\bundefined reference to\b"
    r"|^(\S*/)?ld(\.\w+)?: (?!warning)"
    r"|Killed signal terminated program"
    r"|No space left on device"
)


def built_version(gpu: str) -> str:
    """Return Horovod's version as `pip list` shows it after a build with `gpu` operations."""
    return f"{HOROVOD_VERSION}+{PATCH_LEVEL}.{'cpu' if gpu == 'none' else gpu}"


def wheel_key(torch_version: str, gpu: str, machine: str, cuda_chips: str = "") -> str:
    """Return the cache's folder for a wheel, with all that makes it differ from another build's.

    `machine` is that of `machine_tag`; `cuda_chips` are empty for Horovod's choice.
    """
    chips = f"_{cuda_chips.replace(',', '.')}" if cuda_chips else ""
    python = sys.implementation.cache_tag
    return f"horovod-{built_version(gpu)}_torch-{torch_version}_{python}_{machine}{chips}"


def machine_tag(cpuinfo: str) -> str:
    """Return what a wheel depends on besides Python and torch; `cpuinfo` is the text of ``/proc/cpuinfo``.

    Horovod compiles with the AVX, F16C and FMA instructions of the machine that builds it (on x86-64), so an
    older machine with the same home directory must not use the same wheel.
    """
    libc, release = platform.libc_ver()
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    has = set(flags[1].split()) if flags else set()
    instructions = ".".join(flag for flag in ("avx", "f16c", "fma") if flag in has) or "baseline"
    return f"{sysconfig.get_platform()}-{libc or 'libc'}{release}-{instructions}"


def max_jobs() -> int:
    """Return how many compilers may run at once: one per CPU, with 1.5 GB of available memory for each."""
    import psutil  # may be missing before the command installs it

    return max(1, min(len(os.sched_getaffinity(0)), psutil.virtual_memory().available // 1_500_000_000))


def compile_environment(
    gpu: str, environ: Mapping[str, str], *, jobs: int, tools: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment in which Horovod's setup runs; `tools` are the variables of `find_tools`."""
    # The user's own HOROVOD_ variables that choose *what* is built are dropped, since the wheel is kept under
    # its key. The others stay, but those that locate CMake, CUDA and NCCL are set to what was found.
    what = ("HOROVOD_WITH", "HOROVOD_GPU", "HOROVOD_CPU_OPERATIONS", "HOROVOD_SKIP_COMPILE", "HOROVOD_DEBUG")
    kept = {name: value for name, value in environ.items() if not name.startswith(what)}
    kept.pop("CMAKE_GENERATOR", None)  # Horovod passes make's options to any generator.
    kept |= {
        "HOROVOD_WITH_GLOO": "1",
        "HOROVOD_WITHOUT_MPI": "1",
        "HOROVOD_WITH_PYTORCH": "1",
        "HOROVOD_WITHOUT_TENSORFLOW": "1",
        "HOROVOD_WITHOUT_MXNET": "1",
        "HOROVOD_LOCAL_VERSION": built_version(gpu).partition("+")[2],
        "CMAKE_POLICY_VERSION_MINIMUM": "3.5",  # CMake 4 refuses Gloo's older one; older CMakes ignore it.
        "MAKEFLAGS": f"-j{jobs}",
    }
    if gpu == "nccl":
        kept["HOROVOD_GPU_OPERATIONS"] = "NCCL"
        # Shared, as torch links it, so that the process has one copy of NCCL.
        kept.setdefault("HOROVOD_NCCL_LINK", "SHARED")
    return {**kept, **tools}


def fetch_source(archive: Path | None, work: Path) -> Path:
    """Return the folder of Horovod's unpacked source under `work`; without `archive`, pip downloads it."""
    if archive is None:
        folder = work / "archive"
        folder.mkdir()
        (folder / "requirement.txt").write_text(SOURCE_REQUIREMENT)
        run_pip(
            *("download", "--no-deps", "--no-build-isolation", "--no-binary", "horovod"),
            *("--dest", str(folder), "--requirement", str(folder / "requirement.txt")),
        )
        archive = next(iter(sorted(folder.glob("horovod-*.tar.gz"))), None)
    if archive is None or not archive.is_file():
        where = archive or "the package index"
        raise BuildError(f"No source archive of Horovod {HOROVOD_VERSION} at {where}.")
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):  # Python 3.10.12, 3.11.4 and later.
            tar.extraction_filter = tarfile.data_filter
        tar.extractall(work / "source")
    scripts = sorted((work / "source").glob("horovod-*/setup.py"))
    if len(scripts) != 1:
        raise BuildError(f"{archive} is not a source archive of Horovod: it has no horovod-*/setup.py.")
    return scripts[0].parent


def compile_wheel(source: Path, folder: Path, environment: dict[str, str], what: str, log: Path) -> None:
    """Compile `source` into a wheel in `folder`, its output in `log` and the progress of `what` on stdout.

    If the build fails, BuildError quotes its first error.
    """
    # No build isolation: pip would compile against a torch that it fetches for itself, not the installed one.
    command = [sys.executable, "-m", "pip", "wheel", "--verbose", "--no-build-isolation", "--no-deps"]
    command += ["--no-cache-dir", "--wheel-dir", str(folder), str(source)]
    began_s = time.monotonic()
    shown = -1
    print(f"{what}: CMake configures it first, for one to three minutes ...", flush=True)
    with log.open("w") as kept:
        # A session of its own, so that one signal ends make and all its compilers.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                kept.write(line)
                done = re.match(r"\s*\[\s*(\d{1,3})%\]", line)  # by CMake
                if done and int(done[1]) // 10 > shown // 10:
                    shown = int(done[1])
                    print(f"{what}: {shown} % after {time.monotonic() - began_s:.0f} s", flush=True)
            status = process.wait()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
    if status != 0:
        lines = log.read_text(errors="replace").splitlines()
        first = first_error(lines)
        cause = f"The first error:\n\n{first}" if first else "\n".join(["Its last lines:\n", *lines[-5:]])
        killed = any("Killed signal terminated program" in line or "out of memory" in line for line in lines)
        cure = "\nThe machine ran out of memory: try --jobs 1." if killed else ""
        raise BuildError(f"Horovod did not compile. {cause}\n{cure}\nFull log: {log}")


def first_error(lines: Sequence[str]) -> str | None:
    """Return the first error in a build log with three lines after it, or None."""
    for number, line in enumerate(lines):
        if _ERROR.search(line.strip()):  # pip indents the compiler's output
            quoted = (text.rstrip()[:400] for text in lines[number : number + 4])
            return textwrap.dedent("\n".join(quoted))
    return None


def fetch_cmake(folder: Path) -> str:
    """Install pip's CMake into `folder`; return the program."""
    print("Downloading CMake (not on PATH, or too old) ...", flush=True)
    run_pip("install", "--no-deps", "--target", str(folder), "cmake")
    # The program itself, not pip's script bin/cmake, which would look for its module in the environment.
    return str(folder / "cmake" / "data" / "bin" / "cmake")


def run_pip(*arguments: str) -> None:
    """Run pip without showing its output; raise BuildError with its last lines if it fails."""
    command = [sys.executable, "-m", "pip", *arguments]
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    ran = subprocess.run(command, stdin=nothing, stdout=pipe, stderr=subprocess.STDOUT, text=True)
    if ran.returncode != 0:
        last = "\n".join(ran.stdout.strip().splitlines()[-8:])
        raise BuildError(f"{' '.join(command)}\nfailed with exit status {ran.returncode}:\n{last}")


class Hunk(NamedTuple):
    """One replacement in one file of Horovod's source tree."""

    patch: str
    path: str
    before: str
    after: str


def hunks(patch: Path) -> Iterator[Hunk]:
    """Yield the hunks of a unified diff; text before its first file is skipped."""
    for file in re.split(r"^--- .*\n\+\+\+ ", patch.read_text(), flags=re.MULTILINE)[1:]:
        header, *parts = re.split(r"^@@.*\n", file, flags=re.MULTILINE)
        for lines in (part.splitlines(keepends=True) for part in parts):
            before, after = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
            yield Hunk(patch.name, header.strip().partition("/")[2], before, after)


def apply(patches: Iterable[Path], source: Path) -> None:
    """Apply the patches to the files under `source`, or none of them if one does not match."""
    changed: dict[Path, str] = {}
    for hunk in (hunk for patch in patches for hunk in hunks(patch)):
        path = source / hunk.path
        if path not in changed:
            changed[path] = path.read_text() if path.is_file() else ""
        times = changed[path].count(hunk.before)
        if times != 1:
            raise BuildError(
                f"{hunk.patch} expects this text once in Horovod's {hunk.path}, "
                f"but found it {times} times:\n{hunk.before.rstrip()}\n"
                "The patches were written for Horovod 0.28.1: pass its archive to --source, or omit --source."
            )
        changed[path] = changed[path].replace(hunk.before, hunk.after)
    for path, text in changed.items():
        path.write_text(text)
