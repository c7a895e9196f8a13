"""Runs core tests with other releases of our dependencies: `make test-matrix`. Prints a table.

    python tools/test_matrix.py [--quick] [NAME...]

The environment for another Ray, pandas or bayesian-optimization is a copy (of hard links) of the one that
this runs in, with one release changed. An environment with another Python or torch is made as users make
theirs: `pip install`, then `horovod-tune install-horovod`, which takes about seven minutes of CPU time unless
the wheel is cached. A combination whose Python this machine lacks is reported as not tried.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Combination:
    """What differs from the environment that this runs in; ``python`` is a command, such as python3.12."""

    requirements: tuple[str, ...] = ()
    python: str | None = None

    @property
    def needs_build(self) -> bool:
        """True if Horovod must be compiled for it."""
        return self.python is not None or any(each.startswith("torch") for each in self.requirements)


# torch before 2.3 was compiled with NumPy 1; newer releases of pyarrow require NumPy 2.
_NUMPY_1 = ("numpy<2", "pyarrow<20")
COMBINATIONS = {
    "as locked": Combination(),
    # Not 2.52: one of Ray's own checks fails there when a trial restarts.
    **{f"ray 2.{minor}": Combination((f"ray[tune]==2.{minor}.*",)) for minor in range(51, 60) if minor != 52},
    "bayesian-optimization 3.0": Combination(("bayesian-optimization==3.0.*",)),
    "pandas 2": Combination(("pandas==2.*",)),
    **{
        f"python 3.{minor}": Combination(("torch==2.13.*",), f"python3.{minor}") for minor in (10, 12, 13, 14)
    },
    "torch 2.1": Combination(("torch==2.1.*", *_NUMPY_1)),
    **{
        f"torch {release}": Combination((f"torch=={release}.*",)) for release in ("2.3", "2.6", "2.9", "2.15")
    },
}
# The checker of private APIs, and real trials: one after the other, with failures and checkpoints.
QUICK = [
    "tests/test_compatibility.py",
    "tests/trials/test_checkpoints.py",
    "tests/trials/test_trial.py",
]
# Also the reader of the files that Tune writes for an experiment, and the searcher.
CORE = [*QUICK, "tests/analysis/test_results.py", "tests/search/test_bayesopt.py"]
# What the core tests need besides the package.
TEST_PACKAGES = ["pytest>=8", "pytest-timeout", "plotly>=6", "rich>=13", "jinja2"]
INSTALL_TIMEOUT_S = 1800
COMPILE_TIMEOUT_S = 3600
TEST_TIMEOUT_S = 1500
# How much of a failed run's output is shown.
FAILURE_LINES = 150


def main() -> int:
    """Run the combinations that the command line names, all by default; return 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of: {', '.join(COMBINATIONS)}")
    parser.add_argument("--quick", action="store_true", help="only real trials and the private APIs")
    arguments = parser.parse_args()
    names = arguments.names or list(COMBINATIONS)
    unknown = set(names) - set(COMBINATIONS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    results = []
    for name in names:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="matrix-", dir=CHECKOUT.parent) as folder:
            try:
                python = environment_for(COMBINATIONS[name], Path(folder, "venv"))
                outcome = run_tests(python, QUICK if arguments.quick else CORE)
            except NotHere as why:
                outcome = f"{NOT_TRIED}: {why}"
            except CannotInstall as error:
                outcome = f"failed: {error}"
        results.append((name, outcome))
        print(f"=== {name}: {outcome} ({time.monotonic() - began_s:.0f} s)", flush=True)
    width = max(map(len, names))
    print("\n" + "\n".join(f"{name:{width}}  {outcome}" for name, outcome in results))
    return int(any(not is_good(outcome) for _, outcome in results))


NOT_TRIED = "not tried"


class NotHere(Exception):
    """This machine does not have what the combination needs."""


class CannotInstall(Exception):
    """The combination cannot be installed; the message is the installer's last line."""


def is_good(outcome: str) -> bool:
    """Return True if every test passed, or the machine cannot run them."""
    return outcome.startswith(NOT_TRIED) or ("passed" in outcome and "failed" not in outcome)


def environment_for(combination: Combination, target: Path) -> Path:
    """Make the combination's environment in `target` and return its Python."""
    if not combination.needs_build:
        python = copy_environment(target)
        if combination.requirements:
            pip_install(python, *combination.requirements)
        return python
    base = shutil.which(combination.python) if combination.python else sys.executable
    if base is None:
        raise NotHere(f"there is no {combination.python} on this machine")
    install([base, "-m", "venv", str(target)], INSTALL_TIMEOUT_S)
    python = target / "bin" / "python"
    # The package is installed for its requirements and its command; the tests run this checkout.
    with tempfile.TemporaryDirectory() as empty:
        pip_install(python, str(CHECKOUT), *TEST_PACKAGES, *combination.requirements)
        install([str(python), "-m", "horovod_tune.cli", "install-horovod"], COMPILE_TIMEOUT_S, cwd=empty)
    return python


def pip_install(python: Path, *requirements: str) -> None:
    """Install with pip, or raise `CannotInstall`."""
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    install([*pip, *requirements], INSTALL_TIMEOUT_S)


def install(command: list[str], timeout_s: float, cwd: str | None = None) -> None:
    """Run an installer's command, or raise `CannotInstall`."""
    try:
        done = subprocess.run(
            command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        raise CannotInstall(f"{command[-1]} did not end within {timeout_s} s") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["no message"]
        raise CannotInstall(f"{said[-1][:300]}")


def copy_environment(target: Path) -> Path:
    """Copy this environment and return the copy's Python; files are shared until pip replaces them."""
    source = Path(sys.prefix)
    shutil.copytree(source, target, copy_function=link, symlinks=True)
    (target / "pyvenv.cfg").unlink()
    shutil.copy2(source / "pyvenv.cfg", target / "pyvenv.cfg")
    return target / "bin" / "python"


def link(source: str, target: str) -> None:
    """Link the file, or copy it if the two are on different file systems."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def run_tests(python: Path, tests: Sequence[str]) -> str:
    """Run tests; return pytest's last line."""
    # Test this checkout. Call pytest as a module: a copy's scripts still name the environment they came from.
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        done = subprocess.run(
            [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
            cwd=CHECKOUT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TEST_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"failed: did not end within {TEST_TIMEOUT_S} s"
    lines = done.stdout.strip().splitlines() or ["no output"]
    if done.returncode:
        print("    " + "\n    ".join(line[:300] for line in lines[-FAILURE_LINES:]), flush=True)
        return f"failed, exit status {done.returncode}: {lines[-1]}"
    return lines[-1]


if __name__ == "__main__":
    sys.exit(main())
