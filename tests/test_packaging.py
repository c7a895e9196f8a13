"""What pip installs: a wheel that compiles nothing, holds the whole package and brings the command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.wheel

CHECKOUT = Path(__file__).resolve().parent.parent


def run(*command: str | Path, cwd: Path | None = None) -> str:
    # What pip installed is looked at, not a checkout that is on the path.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(part) for part in command]
    ran = subprocess.run(
        words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = request.config.getoption("--wheel-dir")
    if given:
        (made,) = Path(given).glob("*.whl")
        return made.resolve()
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, CHECKOUT / "tools" / "make_wheel.py", folder)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment's commands; it has the wheel, and what that needs from this environment."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    # Without this environment's own .pth files, so not the checkout that is installed in it.
    needed = next(path for path in sys.path if path.endswith("site-packages"))
    (Path(site) / "needed.pth").write_text(needed + "\n")
    return folder / "bin"


def test_the_wheel_is_for_every_platform_and_holds_every_file_of_the_package(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("horovod_tune/")}
    # Some of its folders are links, to files that stand at the top for people to read.
    there = {
        str(Path(folder, name).relative_to(CHECKOUT))
        for folder, _, names in os.walk(CHECKOUT / "horovod_tune", followlinks=True)
        for name in names
        if not name.endswith(".pyc")
    }
    assert packed == there


def test_every_public_module_can_be_imported_from_the_installed_wheel(
    installed: Path, tmp_path: Path
) -> None:
    program = """
import importlib
for name in ("", ".search", ".large_batch", ".analysis", ".analysis.plots"):
    module = importlib.import_module("horovod_tune" + name)
    for public in module.__all__:
        getattr(module, public)
print(importlib.import_module("horovod_tune").__file__)
"""
    where = run(installed / "python", "-c", program, cwd=tmp_path)
    assert Path(where).is_relative_to(installed.parent), "the package is the wheel's"


def test_the_installed_command_works_and_an_example_starts(
    wheel: Path, installed: Path, tmp_path: Path
) -> None:
    command = installed / "horovod-tune"
    assert "install-horovod" in run(command, "--help", cwd=tmp_path)
    assert run(command, "--version", cwd=tmp_path).strip() in wheel.name
    said = run(command, "doctor", cwd=tmp_path)
    assert "ok  horovod_tune" in said and "compiled for torch" in said
    shutil.copy(CHECKOUT / "examples" / "bayesopt_digits.py", tmp_path)
    assert "--num-slots" in run(installed / "python", "bayesopt_digits.py", "--help", cwd=tmp_path)
