"""What pip installs: a wheel that compiles nothing, holds the whole package and brings the command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, cwd: Path | None = None) -> str:
    # What pip installed is looked at, not a checkout that whoever runs this has on the path.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(part) for part in command]
    ran = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    left_out = shutil.ignore_patterns(
        ".*", "build", "*.egg-info", "__pycache__", "tests", "benchmarks", "results"
    )
    shutil.copytree(CHECKOUT, source, ignore=left_out)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source)
    (made,) = folder.glob("*.whl")
    return made


def test_the_wheel_is_for_every_platform(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_wheel_holds_every_file_of_the_package(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("horovod_tune/")}
    # Some of its folders are links, to files that stand at the top for people to read.
    there = {
        str(Path(folder, name).relative_to(CHECKOUT))
        for folder, _, names in os.walk(CHECKOUT / "horovod_tune", followlinks=True)
        for name in names
        if not name.endswith(".pyc")
    }
    assert packed == there


def test_the_installed_wheel_has_the_command(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    # What the package needs is this environment's; the package itself must be the wheel's.
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    needed = next(path for path in sys.path if path.endswith("site-packages"))
    (Path(site) / "needed.pth").write_text(needed + "\n")
    where = run(python, "-c", "import horovod_tune; print(horovod_tune.__file__)", cwd=tmp_path)
    assert where.startswith(site)
    command = tmp_path / "venv" / "bin" / "horovod-tune"
    assert "install-horovod" in run(command, "--help", cwd=tmp_path)
    assert run(command, "--version", cwd=tmp_path).strip() in wheel.name
