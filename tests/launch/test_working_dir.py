"""What goes along with the script, and what stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from horovod_tune.launch import working_dir
from horovod_tune.launch.script import can_resume
from horovod_tune.launch.values import LaunchError
from horovod_tune.launch.working_dir import files_to_ship, stage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in (
        "tune.py", "helpers/nets.py", "data/a.csv", ".ssh/id", ".env", ".git/config", "venv/pyvenv.cfg",
        "venv/lib/x.py", "ray_results/exp/result.json", "out/exp/result.json",
        "helpers/__pycache__/nets.pyc", "big/x.bin",
    ):  # fmt: skip
        file = tmp_path / "project" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return tmp_path / "project"


def test_modules_and_data_go_and_keys_environments_and_results_stay(folder: Path) -> None:
    (folder / ".rayignore").write_text("# large\nbig/\n")
    found = files_to_ship(folder, results=folder / "out")
    assert sorted(found) == ["data/a.csv", "helpers/nets.py", "tune.py"]
    assert sorted(files_to_ship(folder, results=folder / "out", exclude=["data", "*.bin"])) == [
        "helpers/nets.py",
        "tune.py",
    ]


def test_what_is_named_goes_under_its_own_name(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "corpus"
    (other / "deep").mkdir(parents=True)
    (other / "deep" / "b.txt").write_text("b")
    found = files_to_ship(folder, [str(other), str(folder / ".env")], results=folder / "out")
    assert found["corpus/deep/b.txt"] == other / "deep/b.txt" and ".env" in found
    stage(found, tmp_path / "staged")
    stage(found, tmp_path / "staged")  # over a former one
    assert (tmp_path / "staged/corpus/deep/b.txt").read_text() == "b"
    (tmp_path / "tune.py").write_text("another")
    with pytest.raises(LaunchError, match=r"the script's folder has another tune\.py"):
        files_to_ship(folder, [str(tmp_path / "tune.py")], results=folder / "out")


def test_what_is_too_large_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working_dir, "LIMIT", 2**20)
    (folder / "big" / "x.bin").write_bytes(b"0" * 2 * 2**20)
    with pytest.raises(LaunchError, match=r"big/x\.bin \(2 MiB\)"):
        files_to_ship(folder, results=folder / "out")


@pytest.mark.parametrize(
    ("source", "resumes"),
    [
        ("from horovod_tune import resume_or_start\nresume_or_start()", True),
        ("from ray import tune\ntune.Tuner.restore('x')", True),
        ("from horovod_tune import resume_or_start as go\ngo()", True),
        ("import os\nos.restored = 'resume_or_start'", False),
        ("# restore\nprint(1)", False),
    ],
)
def test_a_script_that_resumes_is_known_by_what_it_uses(source: str, resumes: bool, tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(source)
    assert can_resume(tmp_path / "s.py") is resumes
