"""Makes the virtual environment that `make` works in. Runs on the system's own Python: standard library only.

    python3 tools/set_up.py [--profile main|xla] [--venv DIR]

The environment is stamped with a hash of its inputs: a second run does nothing unless an input has changed.
An interrupted run can be repeated. TORCH=auto|cpu|pip chooses the build of torch (see `TORCH_CHOICES`);
pip's own variables (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...) and PIP_EXTRA, arguments for `pip install`,
are honoured.
"""

from __future__ import annotations

import argparse
import fcntl
import glob
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
LOCK_TIMEOUT_S = 3600.0
OLDEST_PYTHON = (3, 10)

TORCH_CHOICES = {
    "auto": "a CPU build if this machine has no GPU, else what pip selects",
    "cpu": "a CPU build",
    "pip": "what pip selects: on x86-64 Linux usually the CUDA build, several GB; it runs on the CPU as well",
}

# The last two are inputs because a change of how Horovod is built must reach existing environments.
INPUTS = (
    "pyproject.toml",
    "setup.py",
    "constraints.txt",
    "tools/set_up.py",
    "horovod_tune/horovod_build/*.py",
    "horovod_tune/horovod_build/patches/*.p*",
)


class SetUpError(Exception):
    """The set-up cannot continue; the message names the cause and the cure."""


@dataclass(frozen=True)
class Profile:
    """One kind of environment."""

    name: str
    folder: str
    torch: str
    # Packages that are installed together with torch, since their releases must match.
    also: tuple[str, ...]
    extras: str
    horovod: bool


PROFILES = {
    "main": Profile("main", ".venv", "2.13.0", (), "dev", horovod=True),
    # torch_xla's newest release is built for this torch, and has no CPU-only build.
    "xla": Profile("xla", ".venv-xla", "2.9.0", ("torch_xla==2.9.0",), "dev", horovod=False),
}


def main() -> int:
    """Set up what the command line requests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", choices=PROFILES, default="main")
    parser.add_argument("--venv", type=Path, help="the environment's folder (default: .venv, .venv-xla)")
    arguments = parser.parse_args()
    profile = PROFILES[arguments.profile]
    try:
        set_up(profile, (arguments.venv or CHECKOUT / profile.folder).absolute(), os.environ)
    except SetUpError as error:
        print(f"\nset-up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up: interrupted; run it again to continue", file=sys.stderr)
        return 130
    return 0


def set_up(profile: Profile, venv: Path, environ: Mapping[str, str]) -> None:
    """Create or update `venv` for `profile`, unless it is complete."""
    torch_choice = environ.get("TORCH") or "auto"
    if torch_choice not in TORCH_CHOICES:
        raise SetUpError(f"TORCH must be one of {', '.join(TORCH_CHOICES)}, got {torch_choice!r}")
    wanted = fingerprint(CHECKOUT, profile, torch_choice, environ.get("PIP_EXTRA", ""))
    stamp = venv / ".set_up_complete"
    if is_complete(stamp, wanted):
        return
    problems = missing_tools(needs_compiler=profile.horovod)
    if problems:
        raise SetUpError(
            "this machine lacks what the set-up needs:\n" + "\n".join(f"- {line}" for line in problems)
        )
    venv.parent.mkdir(parents=True, exist_ok=True)
    with lock(venv.parent / f"{venv.name}.lock"):
        if is_complete(stamp, wanted):  # by the set-up that held the lock
            return
        began_s = time.monotonic()
        stamp.unlink(missing_ok=True)
        make_environment(venv)
        under_way = venv / ".set_up_under_way"
        under_way.touch()
        fill(profile, venv, torch_choice, environ)
        under_way.unlink()
        # The packages are complete even if the build below fails: the next set-up keeps them.
        if profile.horovod:
            install_horovod(venv)
        coming = stamp.with_suffix(".part")
        coming.write_text(wanted)
        os.replace(coming, stamp)
        say(f"{venv.name} is complete after {time.monotonic() - began_s:.0f} s.")


def fill(profile: Profile, venv: Path, torch_choice: str, environ: Mapping[str, str]) -> None:
    """Install torch, and this package with what it needs."""
    python = str(venv / "bin" / "python")
    extra = shlex.split(environ.get("PIP_EXTRA", ""))
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run_pip([*pip, *extra, "--upgrade", "pip", "setuptools", "wheel"])
    install_torch(profile, python, [*pip, *extra], torch_choice)
    say("Installing horovod_tune and what it needs ...")
    held = [f"--constraint={CHECKOUT / 'constraints.txt'}"]
    run_pip([*pip, *extra, *held, f"torch=={profile.torch}", "--editable", f"{CHECKOUT}[{profile.extras}]"])


def install_horovod(venv: Path) -> None:
    """Compile Horovod for the torch in `venv`, and install it there."""
    run([str(venv / "bin" / "python"), "-m", "horovod_tune.cli", "install-horovod"])


def install_torch(profile: Profile, python: str, pip: list[str], choice: str) -> None:
    """Install the build of torch that suits `choice` and the machine."""
    wanted = [f"torch=={profile.torch}", *profile.also]
    if not needs_cpu_build(choice, gpu=has_gpu(), machine=platform.machine(), also=profile.also):
        say(f"Installing {' and '.join(wanted)} ...")
        run_pip([*pip, *wanted])
        return
    present = run_quietly([python, "-c", "import torch; print(torch.__version__, torch.version.cuda)"])
    if present is not None and present.split()[0].startswith(profile.torch) and present.split()[-1] == "None":
        return
    say(f"Installing {wanted[0]} for the CPU ...")
    if offers_cpu_build(pip, wanted[0]):
        run_pip([*pip, *wanted])
        return
    # pip has no option for the CPU build, which torch publishes on another index; uv has one.
    run_pip([*pip, "uv"])
    uv = [python, "-m", "uv", "pip", "install", "--quiet", "--python", python]
    if subprocess.run([*uv, "--torch-backend", "cpu", *wanted], stdin=subprocess.DEVNULL).returncode != 0:
        raise SetUpError(
            "could not install a CPU build of torch. Either set PIP_EXTRA_INDEX_URL to the index of CPU "
            "builds that torch's own installation page gives, or take the build that pip finds (several GB "
            "with its CUDA packages; it runs on the CPU as well): TORCH=pip make ..."
        )


def needs_cpu_build(choice: str, *, gpu: bool, machine: str, also: tuple[str, ...]) -> bool:
    """Return True if a build of torch without CUDA must be requested explicitly.

    Only x86-64 Linux has two builds of one version. torch_xla, which is in ``also``, has no CPU-only build.
    """
    if also:
        return False
    return choice == "cpu" or (choice == "auto" and not gpu and machine in ("x86_64", "AMD64"))


def offers_cpu_build(pip: list[str], requirement: str) -> bool:
    """Return True if pip, as configured here, selects a CPU build by itself."""
    said = run_quietly([*pip, "--dry-run", "--no-deps", "--ignore-installed", "--report", "-", requirement])
    if said is None:
        return False
    return all(item["metadata"]["version"].endswith("+cpu") for item in json.loads(said)["install"])


def has_gpu() -> bool:
    """Return True if this machine has the device file of a GPU: NVIDIA's, WSL's or AMD's."""
    return any(glob.glob(pattern) for pattern in ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd"))


def make_environment(venv: Path) -> None:
    """Make an empty environment, unless there is one with this Python whose set-up was not interrupted.

    pip may not repair a package whose installation was interrupted. Downloads stay in pip's cache.
    """
    python = venv / "bin" / "python"
    version = (
        run_quietly([str(python), "-c", "import sys; print(*sys.version_info[:2])"])
        if python.exists()
        else None
    )
    sound = version == "{} {}\n".format(*sys.version_info[:2]) and not (venv / ".set_up_under_way").exists()
    if sound:
        return
    if venv.exists():
        if not (venv / ".made_by_set_up").is_file() and any(venv.iterdir()):
            raise SetUpError(f"{venv} exists and was not made by make. Move it, or name another: VENV=DIR")
        shutil.rmtree(venv)
    say(f"Making the virtual environment {venv} ...")
    venv.mkdir(parents=True, exist_ok=True)
    (venv / ".made_by_set_up").touch()
    run([sys.executable, "-m", "venv", str(venv)])


def missing_tools(*, needs_compiler: bool) -> list[str]:
    """Return a line per tool that this machine lacks; the last line has the commands that install them."""
    missing, packages = [], []
    if sys.version_info < OLDEST_PYTHON:
        missing.append(
            f"Python {platform.python_version()} ({sys.executable}) is older than 3.10. "
            "Install a newer one and name it: make PYTHON=python3.12 ..."
        )
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        missing.append("Python's modules venv and ensurepip")
        packages.append((f"{_debian_python()}-venv", "python3"))
    if needs_compiler:
        compilers = (*os.environ.get("CXX", "").split()[:1], "c++", "g++", "clang++")
        if not any(shutil.which(name) for name in compilers):
            missing.append("a C++ compiler (c++, g++ or clang++)")
            packages.append(("g++", "gcc-c++"))
        header = Path(sysconfig.get_path("include")) / "Python.h"
        if not header.is_file():
            missing.append(f"Python's header file {header}")
            packages.append((f"{_debian_python()}-dev", "python3-devel"))
    if packages:
        debian, fedora = (" ".join(pair[i] for pair in packages) for i in (0, 1))
        missing.append(
            f"To install them on Debian or Ubuntu: apt-get install {debian}. On Fedora: dnf install {fedora}."
        )
    return missing


def _debian_python() -> str:
    return "python{}.{}".format(*sys.version_info[:2])


def fingerprint(checkout: Path, profile: Profile, torch_choice: str, pip_extra: str) -> str:
    """Return a hash of the environment's inputs, and of the checkout's path: environments cannot be moved."""
    digest = hashlib.sha256()
    for part in (str(checkout), repr(profile), torch_choice, pip_extra, sys.version):
        digest.update(part.encode() + b"\0")
    for pattern in INPUTS:
        for path in sorted(checkout.glob(pattern)):
            digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def is_complete(stamp: Path, wanted: str) -> bool:
    """Return True if the stamped environment is the wanted one."""
    return stamp.is_file() and stamp.read_text() == wanted and (stamp.parent / "bin" / "python").exists()


@contextmanager
def lock(path: Path, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the lock file `path`; the kernel releases the lock when its holder ends, even if it is killed."""
    ends_s = time.monotonic() + timeout_s
    with path.open("a+") as file:
        said = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > ends_s:
                    raise SetUpError(
                        f"another set-up has held {path} for {timeout_s:.0f} s: wait for it or end it"
                    ) from None
            if not said:
                say("Another set-up of this checkout is running; waiting for it.")
                said = True
            time.sleep(0.5)
        yield


def run(command: list[str]) -> None:
    """Run a command and show its output as it comes."""
    status = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
    if status != 0:
        raise SetUpError(f"exit status {status} (the cause is above) from: {shlex.join(command)}")


def run_pip(command: list[str]) -> None:
    """Run a pip command; show its output only if it fails, since its warnings are not for the user."""
    ran = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if ran.returncode != 0:
        raise SetUpError(f"exit status {ran.returncode} from {shlex.join(command)}:\n{ran.stdout.rstrip()}")


def run_quietly(command: list[str]) -> str | None:
    """Return what a command prints to stdout, or None if it fails."""
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return ran.stdout if ran.returncode == 0 else None


def say(text: str) -> None:
    """Print without buffering, so that the text is above the output of the next command."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
