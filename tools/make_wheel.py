"""Builds the wheel from a copy of the checkout, so that no file of an earlier build gets into it.

python tools/make_wheel.py dist
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
_NOT_COPIED = (".*", "build", "dist", "*.egg-info", "__pycache__", "tests", "benchmarks", "results")


def make_wheel(folder: Path) -> Path:
    """Build the wheel in `folder`, remove older ones, and return its path."""
    for older in folder.glob("horovod_tune-*.whl"):
        older.unlink()
    with tempfile.TemporaryDirectory() as copy:
        source = Path(copy) / "source"
        shutil.copytree(CHECKOUT, source, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*pip, "--wheel-dir", str(folder), str(source)], check=True, timeout=300)
    (made,) = folder.glob("horovod_tune-*.whl")
    return made


if __name__ == "__main__":
    print(make_wheel(Path(sys.argv[1])))
