"""What Tune stores of a search is replaced as a whole: a killed driver leaves no file that is cut."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pyarrow.fs import LocalFileSystem
from ray.train._internal import storage

from horovod_tune.ray_compat.patches.stored_state import replace_stored_files


def upload(source: Path, target: Path) -> None:
    replace_stored_files()
    storage._upload_to_fs_path(str(source), LocalFileSystem(), str(target))


@pytest.fixture
def staged(tmp_path: Path) -> Path:
    folder = tmp_path / "driver_artifacts"
    (folder / "trial").mkdir(parents=True)
    (folder / "experiment_state.json").write_text("first")
    (folder / "trial" / "result.json").write_text("1\n")
    return folder


def test_all_files_arrive_and_later_versions_replace_them(staged: Path, tmp_path: Path) -> None:
    stored = tmp_path / "storage" / "search"
    upload(staged, stored)
    (staged / "trial" / "result.json").write_text("1\n2\n")
    upload(staged, stored)
    found = {str(path.relative_to(stored)): path.read_text() for path in stored.rglob("*") if path.is_file()}
    assert found == {"experiment_state.json": "first", "trial/result.json": "1\n2\n"}


def test_a_temporary_file_that_tune_renames_meanwhile_does_not_end_the_copy(
    staged: Path, tmp_path: Path
) -> None:
    (staged / ".tmp").symlink_to(tmp_path / "gone")
    upload(staged, tmp_path / "storage")
    assert (tmp_path / "storage" / "trial" / "result.json").exists()


def test_a_copy_that_is_cut_leaves_the_earlier_file(
    staged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = tmp_path / "storage"
    upload(staged, stored)
    (staged / "experiment_state.json").write_text("second")

    def killed(source: Path, target: Path) -> None:
        Path(target).write_text("se")
        raise SystemExit

    monkeypatch.setattr(shutil, "copy2", killed)
    with pytest.raises(SystemExit):
        upload(staged, stored)
    assert (stored / "experiment_state.json").read_text() == "first"
    assert not list(stored.glob("experiment_state*.part")), "Tune would take it for a state"
