"""Finds the installed torch, Horovod and build tools; names each that is missing, with its cure.

Only `probe` imports torch or Horovod, in a new process: that takes seconds, and fails in exactly the cases of
interest here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_tune.horovod_build import BuildError
from horovod_tune.horovod_build.patches import PATCH_LEVEL

IMPORT_TIMEOUT_S = 120.0
# Ray hides the GPUs this way from actors that request none, such as the one that examines a node.
HIDES_GPUS = {("CUDA_VISIBLE_DEVICES", ""), ("HIP_VISIBLE_DEVICES", ""), ("ROCR_VISIBLE_DEVICES", "")}
# Precedes the facts in a process's output: libraries print lines of their own when they are imported.
MARK = "horovod_tune facts: "
_RAISED = re.compile(r"[A-Za-z_][\w.]*(Error|Exception): ")
HOROVOD_FACTS = "{'gloo': bool(hvd.gloo_built()), 'nccl': bool(hvd.nccl_built())}"


@dataclass(frozen=True)
class InstalledTorch:
    """The torch of this environment, as its `version.py` states it; the doctor adds what an import shows."""

    version: str
    cuda: str | None = None  # the CUDA release it was built for, such as ``"12.8"``; None for a CPU build
    gpus: tuple[str, ...] = ()  # the names of the GPUs that it sees
    error: str | None = None  # why it cannot be imported

    @property
    def release(self) -> tuple[int, int]:
        """The version's major and minor number."""
        major, minor = self.version.split("+")[0].split(".")[:2]
        return int(major), int(minor)


@dataclass(frozen=True)
class InstalledHorovod:
    """The Horovod of this environment; the doctor adds what an import shows."""

    version: str  # as pip shows it: ``0.28.1+ht7.cpu`` if `install-horovod` built it
    torch_version: str | None = None  # the torch it was compiled for; None if it was built without torch
    gloo: bool = False
    nccl: bool = False
    error: str | None = None  # why it cannot be imported

    @property
    def patch_level(self) -> str | None:
        """The level of our patches (``"ht7"``), or None for any other build."""
        level = self.version.partition("+")[2].split(".")[0]
        return level if level.startswith("ht") else None


def installed_torch() -> InstalledTorch | None:
    """Return this environment's torch, or None."""
    package = _package_folder("torch")
    if package is None or not (package / "version.py").is_file():
        return None
    source = (package / "version.py").read_text()
    values = dict(re.findall(r"""^(__version__|cuda)\b[^=\n]*= *["']([^"']+)["']""", source, re.MULTILINE))
    return InstalledTorch(values["__version__"], values.get("cuda")) if "__version__" in values else None


def installed_horovod() -> InstalledHorovod | None:
    """Return this environment's Horovod, or None."""
    package = _package_folder("horovod")
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None
    if package is None:
        return None
    metadata = package / "metadata.json"
    built_for = json.loads(metadata.read_text()) if metadata.is_file() else {}
    return InstalledHorovod(version, built_for.get("pytorch"))


def probe(
    imports: str,
    facts: str = "{}",
    timeout_s: float = IMPORT_TIMEOUT_S,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Any]:
    """Try `imports` in a new process, since they cannot be undone, and a crash would end this process.

    Return the value of `facts` after them, ``{"error": why}``, or ``{"slow_s": seconds}``.
    """
    program = f"import json\n{imports}\nprint('\\n{MARK}' + json.dumps({facts}))"
    environment = {key: value for key, value in environ.items() if (key, value) not in HIDES_GPUS}
    # What Ray put on this process's path (the driver's folder, py_modules) is on the ranks' paths too.
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command, limit_s = [sys.executable, "-c", program], max(0.1, timeout_s)
    quiet: dict[str, Any] = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    try:
        ran = subprocess.run(command, env=environment, timeout=limit_s, **quiet)
    except subprocess.TimeoutExpired:
        return {"slow_s": limit_s}
    _, has_facts, after = ran.stdout.rpartition(MARK)
    if ran.returncode == 0 and has_facts:
        return dict(json.loads(after.splitlines()[0]))
    raised = [line.strip() for line in ran.stderr.splitlines() if line.strip()]
    first, *others = [line for line in ran.stderr.splitlines() if _RAISED.match(line)] or [""]
    if others:  # of a chain, the first names the cause
        raised[-1] += f" (after {first})"
    if ran.returncode < 0:
        # An exception of C++ aborts; the last line says which.
        return {"error": ": ".join([f"the import was ended by signal {-ran.returncode}", *raised[-1:]])}
    # Horovod prints why its library does not load, continues, and fails because of something else.
    output = ran.stdout if imports.startswith("import horovod") else ""
    printed = [line.strip() for line in output.splitlines() if line.strip()]
    return {"error": (printed or raised[-1:] or [f"exit status {ran.returncode}"])[0]}


def advice_on_failed_init(horovod: InstalledHorovod | None) -> str:
    """Return advice for ranks that could not connect; empty if Horovod has our newest patches."""
    if horovod is None or horovod.patch_level == PATCH_LEVEL:
        return ""
    return (
        f"Horovod {horovod.version} accepts any client on a rank's port, so a port scan or another user of "
        "the host can abort hvd.init(). A build by `horovod-tune install-horovod` accepts only ranks."
    )


def _package_folder(name: str) -> Path | None:
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def imported_file(module: str) -> Path | None:
    """Return the file that the import of a top-level module finds, or None."""
    importlib.invalidate_caches()
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin and spec.has_location else None


# The cure if another file hides an installed package.
UNHIDE = "Rename it, take its folder off PYTHONPATH, or start in another folder."


def hiding_file(package: str) -> Path | None:
    """Return the file that an import finds instead of an installed package; None if there is none.

    Such as a clone of Horovod's sources in the current folder, or a user's own `torch.py`.
    """
    # Ray has a psutil of its own, which precedes the installed one in its processes.
    installed = list(importlib.metadata.distributions(name=package))
    files = [file for each in installed for file in each.files or ()]
    places = {Path(str(file.locate())).resolve() for file in files}
    for file in files:  # those of an editable installation are not listed
        folder, _, name = str(file).rpartition("/")
        if "/" in folder or (name != "__init__.py" if folder else not name.endswith(".py")):
            continue
        imported = imported_file(folder or name.removesuffix(".py"))
        if imported is not None and imported.resolve() not in places:
            return imported
    return None


OLDEST_CMAKE = (3, 13)
CUDA_VARIABLES = ("HOROVOD_CUDA_HOME", "CUDA_HOME")


def find_tools(torch: InstalledTorch, gpu: str, environ: Mapping[str, str], work: Path) -> dict[str, str]:
    """Return the variables that tell Horovod's setup where its tools are; BuildError lists what is missing.

    HOROVOD_CMAKE is not among them if no CMake is new enough. `work` gets a link to NCCL's library.
    """
    missing, cmake = list(_missing_tools(environ)), find_cmake(environ)
    tools = {"HOROVOD_CMAKE": cmake} if cmake else {}
    if gpu == "nccl":
        home, nvcc = find_cuda(environ) or (None, None)
        include, library = find_nccl(environ, [Path(entry) for entry in sys.path if entry]) or (None, None)
        release = re.search(r"release (\d+\.\d+)", (nvcc and output_of(str(nvcc), "--version")) or "")
        missing += _missing_for_nccl(torch, nvcc, release[1] if release else None, library)
        if home and library:
            # The linker looks for `libnccl.so`, but torch's package has only `libnccl.so.2`.
            (work / "libnccl.so").symlink_to(library)
            tools |= {"HOROVOD_NCCL_INCLUDE": str(include), "HOROVOD_NCCL_LIB": str(work)}
            tools |= dict.fromkeys(CUDA_VARIABLES, str(home))
            tools["PATH"] = f"{home / 'bin'}{os.pathsep}{environ.get('PATH', os.defpath)}"
    if missing:
        raise BuildError("Horovod cannot be compiled here:\n" + "\n".join(f"- {line}" for line in missing))
    return tools


def _missing_tools(environ: Mapping[str, str]) -> Iterator[str]:
    if not any(map(shutil.which, (*environ.get("CXX", "").split()[:1], "c++", "g++", "clang++"))):
        cure = "Debian, Ubuntu: apt-get install g++. Fedora: dnf install gcc-c++."
        yield f"No C++ compiler (c++, g++ or clang++). {cure}"
    if shutil.which("make") is None:
        yield "No make. Debian, Ubuntu: apt-get install make. Fedora: dnf install make."
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        cure = "Debian, Ubuntu: apt-get install python3-dev. Fedora: dnf install python3-devel."
        yield f"Python's header file Python.h is not in {sysconfig.get_path('include')}. {cure}"
    if importlib.util.find_spec("pip") is None:
        yield f"{sys.executable} has no pip. Run: {sys.executable} -m ensurepip"


def _missing_for_nccl(
    torch: InstalledTorch, nvcc: Path | None, nvcc_release: str | None, nccl: Path | None
) -> Iterator[str]:
    if torch.cuda is None:
        yield (
            f"torch {torch.version} is not a CUDA build, so its tensors are never on a GPU. "
            "Install a CUDA build of torch first, or leave out --gpu nccl."
        )
    if nvcc is None:
        yield (
            "No nvcc in $HOROVOD_CUDA_HOME, $CUDA_HOME, $PATH or /usr/local/cuda. Install the CUDA toolkit"
            f"{'' if torch.cuda is None else ' ' + torch.cuda}, or set HOROVOD_CUDA_HOME to its folder."
        )
    elif torch.cuda and nvcc_release and nvcc_release.split(".")[0] != torch.cuda.split(".")[0]:
        yield (
            f"{nvcc} is CUDA {nvcc_release}, but torch {torch.version} was built for CUDA "
            f"{torch.cuda}. Set HOROVOD_CUDA_HOME to a CUDA {torch.cuda.split('.')[0]} toolkit."
        )
    if nccl is None:
        yield (
            "No NCCL (nccl.h and libnccl) in $HOROVOD_NCCL_HOME, in torch's packages, in the CUDA toolkit "
            "or in the system. Run pip install nvidia-nccl-cu12 (with the number of torch's CUDA); or, on "
            "Debian or Ubuntu with NVIDIA's packages, apt-get install libnccl-dev; or set HOROVOD_NCCL_HOME "
            "to its folder."
        )


def find_cmake(environ: Mapping[str, str]) -> str | None:
    """Return a CMake that is new enough for Horovod: `$HOROVOD_CMAKE`, else the one on the path."""
    for name in (environ.get("HOROVOD_CMAKE"), "cmake"):
        path = shutil.which(name or "")
        version = output_of(path, "--version") if path else None
        release = re.search(r"cmake version (\d+)\.(\d+)", version or "")
        if release and (int(release[1]), int(release[2])) >= OLDEST_CMAKE:
            return path
    return None


def find_cuda(environ: Mapping[str, str]) -> tuple[Path, Path] | None:
    """Return CUDA's folder and its compiler; look for them in the same order as Horovod's own build."""
    folders = [Path(folder) for folder in map(environ.get, CUDA_VARIABLES) if folder]
    candidates = [(folder, folder / "bin" / "nvcc") for folder in folders]
    if on_path := shutil.which("nvcc", path=environ.get("PATH")):
        # It may be a wrapper outside its toolkit, which it names itself.
        said = output_of(on_path, "--dryrun", "-x", "cu", os.devnull) or ""
        named = re.search(r"^#\$ TOP=(.+)$", said, re.MULTILINE)
        folder = Path(named[1].strip()).resolve() if named else Path(on_path).resolve().parent.parent
        candidates.append((folder, Path(on_path)))
    candidates.append((Path("/usr/local/cuda"), Path("/usr/local/cuda/bin/nvcc")))
    return next(((folder, nvcc) for folder, nvcc in candidates if os.access(nvcc, os.X_OK)), None)


def find_nccl(environ: Mapping[str, str], packages: Sequence[Path]) -> tuple[Path, Path] | None:
    """Return NCCL's header folder and shared library; `packages` are folders of installed packages."""
    # The copy in the packages that CUDA builds of torch install is the one that a training process loads.
    in_packages = [entry / "nvidia/nccl" for entry in packages]
    cuda = [*map(environ.get, CUDA_VARIABLES), "/usr/local/cuda"]
    homes = [Path(home) for home in (environ.get("HOROVOD_NCCL_HOME"), *in_packages, *cuda) if home]
    places = [(home / "include", home / lib) for home in homes for lib in ("lib", "lib64")]
    system = [*sorted(Path("/usr/lib").glob("*-linux-gnu")), Path("/usr/lib64")]
    places += [(Path("/usr/include"), folder) for folder in system]
    for include, folder in places:
        for library in (folder / "libnccl.so", folder / "libnccl.so.2"):
            if (include / "nccl.h").is_file() and library.exists():
                return include, library
    return None


def output_of(*command: str) -> str | None:
    """Return what a command prints, or None if it cannot be run or fails."""
    try:
        stdin, stderr = subprocess.DEVNULL, subprocess.STDOUT
        return subprocess.check_output(command, stderr=stderr, stdin=stdin, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
