"""Runs a core of the tests with other releases of what we stand on: `make test-matrix`. Prints a table.

    python tools/test_matrix.py [NAME...]

Each combination is a copy (of hard links) of the environment that this runs in, with one release changed.
Horovod is compiled for its torch and its Python, so those two stay; others need an environment of their own
(`make set-up VENV=... PYTHON=...`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent

COMBINATIONS = {
    "as locked": [],
    **{f"ray {minor}": [f"ray[tune]=={minor}.*"] for minor in [f"2.{number}" for number in range(51, 60)]},
    "bayesian-optimization 3.0": ["bayesian-optimization==3.0.*"],
    "pandas 2": ["pandas==2.*"],
}
# Shapes of private parts, the search, the reader of experiments; real trials that fail, with checkpoints.
CORE = [
    "tests/test_private_parts.py",
    "tests/ray_adapter",
    "tests/search/test_bayesopt.py",
    "tests/analysis/test_results.py",
    "tests/trials/test_checkpoints.py",
    "tests/trials/test_warm_in_tune.py",
]
INSTALL_TIMEOUT_S = 900
TEST_TIMEOUT_S = 1500


def main() -> int:
    """Run the combinations that the command line names, all by default; 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(COMBINATIONS)}")
    names = parser.parse_args().names or list(COMBINATIONS)
    unknown = set(names) - set(COMBINATIONS)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    results = []
    for name in names:
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="matrix-", dir=CHECKOUT.parent) as folder:
            outcome = run_core(copy_environment(Path(folder, "venv")), COMBINATIONS[name])
        results.append((name, outcome))
        print(f"=== {name}: {outcome} ({time.monotonic() - began_s:.0f} s)", flush=True)
    width = max(map(len, names))
    print("\n" + "\n".join(f"{name:{width}}  {outcome}" for name, outcome in results))
    return int(any("passed" not in outcome or "failed" in outcome for _, outcome in results))


def copy_environment(target: Path) -> Path:
    """Return the Python of a copy of this environment; files are shared until pip replaces them."""
    source = Path(sys.prefix)
    shutil.copytree(source, target, copy_function=link, symlinks=True)
    (target / "pyvenv.cfg").unlink()
    shutil.copy2(source / "pyvenv.cfg", target / "pyvenv.cfg")
    return target / "bin" / "python"


def link(source: str, target: str) -> None:
    """Link the file, or copy it where the two are on different disks."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def run_core(python: Path, requirements: list[str]) -> str:
    """Install `requirements` and run the core; return pytest's last line, or what pip said."""
    if requirements:
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements]
        installed = subprocess.run(
            pip, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
        if installed.returncode:
            return "pip: " + (installed.stderr.strip().splitlines() or ["no message"])[-1]
    # This checkout is what is tested; the copy's scripts still name the environment they came from.
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "RAY_USAGE_STATS_ENABLED": "0"}
    try:
        tests = subprocess.run(
            [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *CORE],
            cwd=CHECKOUT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TEST_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"failed: not over after {TEST_TIMEOUT_S} s"
    lines = tests.stdout.strip().splitlines() or ["failed without output"]
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print("   ", line[:200])
    return lines[-1]


if __name__ == "__main__":
    sys.exit(main())
