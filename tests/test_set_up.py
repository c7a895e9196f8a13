"""`make`: what is missing is named; a second call does nothing; an interrupted one is repeated."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import stand_in

pytestmark = pytest.mark.processes

CHECKOUT = Path(__file__).resolve().parent.parent

spec = importlib.util.spec_from_file_location("set_up", CHECKOUT / "tools" / "set_up.py")
assert spec is not None and spec.loader is not None
set_up = importlib.util.module_from_spec(spec)
sys.modules["set_up"] = set_up
spec.loader.exec_module(set_up)

MAIN = set_up.PROFILES["main"]
PYTHON = "python{}.{}".format(*sys.version_info[:2])


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The environments that were filled; what takes minutes and a network is only noted."""
    calls: list[Path] = []
    monkeypatch.setattr(set_up, "fill", lambda profile, venv, choice, environ: calls.append(venv))
    monkeypatch.setattr(set_up, "install_horovod", lambda venv: None)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "error", "is_kept"),
    [("fill", KeyboardInterrupt(), False), ("install_horovod", set_up.SetUpError("compiler"), True)],
    ids=["interrupted", "a failed build of Horovod"],
)
def test_a_set_up_that_ended_early_is_repeated_and_what_a_failed_build_had_installed_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filled: list[Path], stage: str, error: Any, is_kept: bool
) -> None:
    venv = tmp_path / "venv"

    def end(*_: object) -> None:
        (venv / "installed").touch()
        raise error

    with monkeypatch.context() as during, pytest.raises(type(error)):
        during.setattr(set_up, stage, end)
        set_up.set_up(MAIN, venv, {})
    assert not (venv / ".set_up_complete").exists()
    before = len(filled)
    set_up.set_up(MAIN, venv, {})
    assert (venv / "installed").exists() is is_kept and (venv / ".set_up_complete").exists()
    set_up.set_up(MAIN, venv, {})
    assert filled[before:] == [venv], "a second call sets up nothing again"
    set_up.set_up(MAIN, venv, {"TORCH": "pip"})
    assert filled[before:] == [venv, venv], "another choice of torch does"


def test_a_folder_that_is_no_environment_is_not_removed_and_a_choice_that_does_not_exist_is_named(
    tmp_path: Path, filled: list[Path]
) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.tex").touch()
    with pytest.raises(set_up.SetUpError, match="was not made by make"):
        set_up.set_up(MAIN, tmp_path / "venv", {})
    assert (tmp_path / "venv" / "thesis.tex").exists() and not filled
    with pytest.raises(set_up.SetUpError, match="TORCH must be one of auto, cpu, pip, got 'gpu'"):
        set_up.set_up(MAIN, tmp_path / "venv", {"TORCH": "gpu"})


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("pyproject.toml", lambda path: path.write_text("")),
        ("constraints.txt", lambda path: path.write_text("ray==1")),
        ("horovod_tune/horovod_build/patches/starting.patch", lambda path: path.write_text("")),
        ("README.md", None),
    ],
)
def test_what_says_how_to_set_up_is_in_the_fingerprint(
    tmp_path: Path, name: str, change: Callable[[Path], int] | None
) -> None:
    for pattern in set_up.INPUTS:
        for path in CHECKOUT.glob(pattern):
            copy = tmp_path / path.relative_to(CHECKOUT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    before = set_up.fingerprint(tmp_path, MAIN, "auto", "")
    (change or Path.touch)(tmp_path / name)
    assert (set_up.fingerprint(tmp_path, MAIN, "auto", "") != before) is (change is not None)


@pytest.mark.parametrize(
    ("choice", "gpu", "machine", "also", "cpu"),
    [
        ("auto", False, "x86_64", (), True),
        ("auto", True, "x86_64", (), False),
        ("auto", False, "aarch64", (), False),
        ("cpu", True, "x86_64", (), True),
        ("pip", False, "x86_64", (), False),
        ("auto", False, "x86_64", ("torch_xla==2.9.0",), False),
    ],
)
def test_a_machine_without_a_gpu_gets_a_cpu_build(
    choice: str, gpu: bool, machine: str, also: tuple[str, ...], cpu: bool
) -> None:
    assert set_up.needs_cpu_build(choice, gpu=gpu, machine=machine, also=also) is cpu


@pytest.mark.parametrize(("offered", "with_uv"), [("2.13.0+cpu", False), ("2.13.0", True)])
def test_uv_is_asked_only_where_pip_has_no_cpu_build(tmp_path: Path, offered: str, with_uv: bool) -> None:
    report = f'{{"install": [{{"metadata": {{"version": "{offered}"}}}}]}}'
    python = stand_in(
        tmp_path,
        "python",
        f'echo "$@" >> {tmp_path}/calls\n'
        f"""case "$*" in *--report*) echo '{report}';; *"import torch"*) exit 1;; esac""",
    )
    pip = [str(python), "-m", "pip", "install"]
    set_up.install_torch(MAIN, str(python), pip, "cpu")
    calls = (tmp_path / "calls").read_text().splitlines()
    uv = [call for call in calls if call.startswith("-m uv")]
    assert len(uv) == with_uv
    if with_uv:
        assert uv[0].endswith("--torch-backend cpu torch==2.13.0")
        assert "-m pip install uv" in calls
    else:
        assert calls[-1] == "-m pip install torch==2.13.0"


def test_where_no_cpu_build_can_be_had_the_error_says_what_to_type(tmp_path: Path) -> None:
    python = stand_in(tmp_path, "python", 'case "$*" in *"pip install uv") exit 0;; *) exit 1;; esac')
    with pytest.raises(set_up.SetUpError, match="TORCH=pip make"):
        set_up.install_torch(MAIN, str(python), [str(python), "-m", "pip", "install"], "cpu")


NO_COMPILER = ("shutil.which", lambda name: None)
NO_HEADERS = ("sysconfig.get_path", lambda name: "/nowhere")


@pytest.mark.parametrize(
    ("take_away", "said"),
    [
        ([NO_COMPILER], "apt-get install g++"),
        ([("importlib.util.find_spec", lambda name: None)], f"apt-get install {PYTHON}-venv"),
        ([NO_HEADERS], f"apt-get install {PYTHON}-dev"),
        ([NO_COMPILER, NO_HEADERS], f"apt-get install g++ {PYTHON}-dev."),
        ([("sys.version_info", (3, 9, 2))], "older than 3.10"),
    ],
)
def test_what_is_missing_is_named_with_one_line_that_says_what_to_type(
    monkeypatch: pytest.MonkeyPatch, take_away: list[tuple[str, object]], said: str
) -> None:
    with monkeypatch.context() as without:
        for thing in take_away:
            without.setattr(*thing)
        missing = set_up.missing_tools(needs_compiler=True)
    assert said in missing[-1]
    assert len(missing) == len(take_away) + ("apt-get" in said)


@pytest.mark.parametrize(
    ("python", "said"),
    [("no-such-python", "There is no no-such-python"), ("{old}", "is Python 3.9.2; 3.10 or newer is needed")],
)
def test_make_names_a_missing_or_an_old_python(tmp_path: Path, python: str, said: str) -> None:
    old = stand_in(tmp_path, "old-python", 'case "$1" in -V) echo Python 3.9.2;; *) exit 1;; esac')
    ran = subprocess.run(
        ["make", f"PYTHON={python.format(old=old)}", "test"],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 2 and said in ran.stderr


def test_make_without_a_target_lists_the_targets() -> None:
    ran = subprocess.run(["make"], cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=True)
    for target in ("demo", "test", "lint", "typecheck", "bench", "test-xla", "test-gpu", "clean"):
        assert f"make {target}" in ran.stdout
