"""The results come, and are compared with what is there, before anything is taken down."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path
from typing import Any

import pytest

from horovod_tune.launch import fetching, ray_up_end
from horovod_tune.launch.fetching import ResultsMissing, differences, plan_fetch
from horovod_tune.launch.launch_record import LaunchRecord
from horovod_tune.launch.values import LaunchError
from horovod_tune.node import head_job
from horovod_tune.node.job_files import JobFiles


class Head:
    """A head on this machine: lists with the real program, copies with shutil, and may lose files."""

    host = "n1"

    def __init__(self, files: JobFiles, lose: int = 0) -> None:
        self.files, self.lose, self.copies = files, lose, 0

    def ask(self, action: str, job: str, **_: Any) -> list[dict[str, Any]]:
        assert job == self.files.job
        if action == "fetched":
            self.files.fetched.touch()
            return []
        return list(head_job.results(self.files))

    def copy(self, source: str, target: str, *, exact: bool, log: Path) -> None:
        self.copies += 1
        there, here = Path(source.removeprefix(":")), Path(target)
        if there.is_file():
            shutil.copy2(there, here)
            return
        shutil.copytree(there, here, dirs_exist_ok=True)
        if self.lose:
            self.lose -= 1
            next(path for path in sorted(here.rglob("*")) if path.is_file()).write_text("cut o")


@pytest.fixture
def job(tmp_path: Path) -> JobFiles:
    files = JobFiles("mine", tmp_path / "head")
    files.folder.mkdir(parents=True)
    (files.folder / "job.json").write_text("{}")
    trial = tmp_path / "elsewhere" / "exp" / "trial"
    trial.mkdir(parents=True)
    (trial / "result.json").write_text('{"loss": 1}\n')
    (trial / "weights.pt").write_bytes(bytes(range(256)) * 999)
    line = f'{{"file_system": "local", "path": "{trial.parent}"}}\n'
    files.experiments.write_text(line * 2)  # restored once
    return files


def test_results_come_from_wherever_the_script_put_them(job: JobFiles, tmp_path: Path) -> None:
    where = fetching.fetch(Head(job), "mine", tmp_path / "here", tmp_path / "log")  # type: ignore[arg-type]
    assert where == [str(tmp_path / "here" / "exp")]
    assert (tmp_path / "here/exp/trial/weights.pt").stat().st_size == 256 * 999
    assert job.fetched.exists()


def test_what_did_not_come_whole_comes_again_or_is_an_error(job: JobFiles, tmp_path: Path) -> None:
    head = Head(job, lose=1)
    fetching.fetch(head, "mine", tmp_path / "here", tmp_path / "log")  # type: ignore[arg-type]
    assert head.copies == 2
    job.fetched.unlink()
    with pytest.raises(ResultsMissing, match=r"1 of 2 files .* did not arrive whole, trial/result\.json"):
        fetching.fetch(Head(job, lose=99), "mine", tmp_path / "there", tmp_path / "log")  # type: ignore[arg-type]
    assert not job.fetched.exists()


def test_a_cluster_whose_results_cannot_be_fetched_stays_up(
    job: JobFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_TUNE_HOME", str(tmp_path / "home"))
    record = LaunchRecord(
        "mine", "aws", ["python", "tune.py"], 0.0, results=str(tmp_path / "here"), phase="over", exit_code=0,
        head={"host": "n1", "user": "me"}, machines="1 x g5.2xlarge", autostop_min=720.0,
    )  # fmt: skip
    record.save()
    monkeypatch.setattr(ray_up_end, "shell_of", lambda record, host=None: Head(job, lose=99))
    monkeypatch.setattr(ray_up_end, "take_down", lambda record: pytest.fail("taken down"))
    with pytest.raises(LaunchError, match=r"The cluster stays up \(1 x g5.*the cluster ends 12 h"):
        ray_up_end.attach(record)
    assert record.phase == "over"


def test_two_experiments_of_one_name_do_not_meet() -> None:
    entries = [
        {"file_system": "local", "path": f"/{disk}/exp", "files": {}, "complete": True} for disk in "ab"
    ]
    assert list(plan_fetch(entries).folders) == ["exp", "exp-2"]


def test_a_bucket_is_looked_into_and_not_copied() -> None:
    there = {"file_system": "s3", "path": "bucket/exp", "files": None, "complete": True}
    assert plan_fetch([there]).in_buckets == ("s3://bucket/exp",)
    (problem,) = plan_fetch([{**there, "complete": False}]).problems
    assert "s3://bucket/exp" in problem


@pytest.mark.parametrize("harm", ["cut", "same size", "missing", "directory"])
def test_every_difference_is_seen(harm: str, tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    (there / "a b\n.bin").write_bytes(b"12345")
    listed = {"a b\n.bin": [5, head_job.checksum(there / "a b\n.bin")]}
    shutil.copytree(there, here)
    assert differences(listed, here) == []
    file = here / "a b\n.bin"
    file.unlink()
    if harm == "cut":
        file.write_bytes(b"123")
    elif harm == "same size":
        file.write_bytes(b"12346")
    elif harm == "directory":
        file.mkdir()
    assert differences(listed, here) == ["a b\n.bin"]


def test_the_record_is_its_users_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_TUNE_HOME", str(tmp_path / "home"))
    record = LaunchRecord("mine", "local", [], 0.0)
    record.save()
    assert stat.S_IMODE((record.folder / "record.json").stat().st_mode) == 0o600
