"""A launch onto a cluster that is up: its job is submitted, followed, fetched; the cluster stays as it is."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from horovod_tune.cli import main
from horovod_tune.launch import ray_up_end, ray_up_launch
from horovod_tune.launch.head_shell import Unreachable
from horovod_tune.launch.launch_record import LaunchRecord, load_record
from horovod_tune.launch.values import LaunchError
from horovod_tune.node import head_job
from horovod_tune.node.job_files import JobFiles


class Head:
    """A head on this machine, whose job has run to its end when it is followed."""

    host = "10.0.0.5"

    def __init__(self, home: Path, *, fails: Exception | None = None, exit_code: int = 3) -> None:
        self.home, self.fails, self.exit_code = home, fails, exit_code
        self.said: list[str] = []

    def run(self, line: str, **_: Any) -> str:
        self.said.append(line)
        return ""

    def copy(self, source: str, target: str, **_: Any) -> None:
        there = target.startswith(":")
        here = self.home / target.removeprefix(":") if there else Path(target)
        shutil.copytree(source.removeprefix(":"), here, dirs_exist_ok=True)

    def ask(self, action: str, job: str, **_: Any) -> list[dict[str, Any]]:
        self.said.append(action)
        if action == "known":
            return [{"known": (self.home / ".horovod-tune" / "jobs" / job).is_dir()}]
        files = JobFiles(job, self.home / ".horovod-tune")
        if action == "submission":
            return [{"job": files.submission()}]
        if action == "submit":
            if self.fails is not None:
                raise self.fails
            assert (files.work / "tune.py").is_file()
            experiment = self.home / "results" / "mine"
            experiment.mkdir(parents=True)
            (experiment / "result.json").write_text("{}\n")
            files.experiments.write_text(f'{{"file_system": "local", "path": "{experiment}"}}\n')
        return list(head_job.results(files)) if action == "results" else []

    def stream(self, *_: str) -> Iterator[dict[str, Any]]:
        yield {"log": "loss 0.5\n", "offset": 9}
        yield {"ended": {"status": "FAILED", "exit_code": self.exit_code, "ended_at_s": 0.0, "message": ""}}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "tune.py").write_text("print()\n")
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("HOROVOD_TUNE_HOME", str(tmp_path / "home"))
    return tmp_path / "project"


def launch(head: Head, monkeypatch: pytest.MonkeyPatch) -> int:
    for module in (ray_up_launch, ray_up_end):
        monkeypatch.setattr(module, "shell_of", lambda record, host=None: head)
    monkeypatch.setattr(ray_up_end, "take_down", lambda record: pytest.fail("the cluster is not ours"))
    return main(["launch", "running", "--head", "me@10.0.0.5", "--name", "mine", "--", "python", "tune.py"])


def test_the_job_runs_its_results_come_and_the_cluster_stays(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert launch(Head(tmp_path / "head"), monkeypatch) == 3  # the script's own
    assert "loss 0.5" in capsys.readouterr().out
    assert (project / "ray_results" / "mine" / "result.json").read_text() == "{}\n"
    assert load_record("mine").phase == "down"


def test_a_name_that_the_cluster_has_seen_is_refused_and_that_job_goes_on(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert launch(Head(tmp_path / "head"), monkeypatch) == 3
    again = Head(tmp_path / "head")
    assert launch(again, monkeypatch) == 2
    assert "has had a job called mine: give another --name" in capsys.readouterr().err
    assert again.said == ["known"]
    assert load_record("mine").phase == "down"


@pytest.mark.parametrize(
    ("error", "status"),
    [(LaunchError("no dashboard"), 2), (Unreachable("no route"), 2), (KeyboardInterrupt(), 130)],
)
def test_what_may_have_been_submitted_is_stopped(
    error: Exception, status: int, project: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ray_up_end, "CONTACT_S", 0.0)
    monkeypatch.setattr(ray_up_end.time, "sleep", lambda seconds: None)
    head = Head(tmp_path / "head", fails=error)
    assert launch(head, monkeypatch) == status
    assert head.said[-1] == "stop"
    assert load_record("mine").phase == "down"


def test_down_ends_the_job_alone(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    LaunchRecord(
        "mine", "running", ["python", "tune.py"], 0.0, phase="submitted", head={"host": "h", "user": "me"}
    ).save()
    head = Head(tmp_path / "head")
    monkeypatch.setattr(ray_up_end, "shell_of", lambda record, host=None: head)
    assert main(["down", "mine"]) == 1
    assert "has results that are not here" in capsys.readouterr().err
    assert main(["down", "--lose-results", "mine"]) == 0
    assert head.said == ["stop"]
    assert load_record("mine").phase == "down"


def test_results_that_are_fetched_after_the_end_end_the_launch_and_no_cluster(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert launch(Head(tmp_path / "head"), monkeypatch) == 3
    shutil.rmtree(project / "ray_results")
    head, ask = Head(tmp_path / "head"), Head.ask
    over = [{"state": {"status": "FAILED", "exit_code": 3}, "fetched": False}]
    monkeypatch.setattr(ray_up_end, "shell_of", lambda record, host=None: head)
    monkeypatch.setattr(
        Head, "ask", lambda self, what, *job, **_: over if what == "status" else ask(self, what, *job)
    )
    load_record("mine").note(phase="submitted", exit_code=None)
    assert main(["status", "mine"]) == 0
    assert "failed, results not fetched yet; on the cluster of me@10.0.0.5" in capsys.readouterr().out
    assert main(["fetch", "mine"]) == 0
    assert (project / "ray_results" / "mine" / "result.json").is_file()
    assert "down" not in capsys.readouterr().err
    assert load_record("mine").phase == "down"
    assert main(["attach", "mine"]) == 3


def test_another_machine_that_ends_the_launch_ends_the_job_and_no_cluster(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    head = Head(tmp_path / "head")
    assert launch(head, monkeypatch) == 3
    monkeypatch.setenv("HOROVOD_TUNE_HOME", str(tmp_path / "another"))
    head.said.clear()
    assert main(["down", "mine", "--head", "me@10.0.0.5", "--lose-results"]) == 0
    assert head.said == ["submission", "stop"]
    assert load_record("mine").command == ["python", "tune.py"]


def test_a_dashboard_that_does_not_listen_yet_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Jobs:
        def list_jobs(self) -> list[Any]:
            return [SimpleNamespace(submission_id="mine")]

    clients: list[Any] = [ConnectionError("Failed to connect to Ray"), Jobs()]

    def client() -> Any:
        if isinstance(clients[0], Exception):
            raise clients.pop(0)
        return clients[0]

    monkeypatch.setattr(head_job, "client", client)
    monkeypatch.setattr(head_job.time, "sleep", lambda seconds: None)
    assert head_job.main(["known", "mine"]) == 0
    assert head_job.main(["known", "other"]) == 0
    assert capsys.readouterr().out == '{"known": true}\n{"known": false}\n'
