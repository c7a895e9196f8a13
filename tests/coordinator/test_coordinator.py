"""The coordinator with a real worker group and a real storage, over simulated workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest
from fake_workers import REQUEST, Clock, FakeTrial, failed
from ray.train._internal.storage import StorageContext

from horovod_tune.coordinator.coordinator import Coordinator
from horovod_tune.coordinator.trial_storage import TrialStorage
from horovod_tune.errors import MetricsError, StartFailed, TrainingFailed
from horovod_tune.messages import FailureKind, Finished, LogChunk, Report
from horovod_tune.ray_compat import queries
from horovod_tune.transfer import node_transfer


class Trial:
    """A coordinator and its trial, with results in a folder, or in a simulated cloud."""

    def __init__(self, clock: Clock, folder: Path, *, in_cloud: bool) -> None:
        self.workers = FakeTrial(clock, 2)
        self.actors = self.workers.actors
        cloud: dict[str, Any] = {}
        if in_cloud:
            (folder / "bucket").mkdir()
            local = pyarrow.fs.LocalFileSystem()
            cloud["storage_filesystem"] = pyarrow.fs.SubTreeFileSystem(str(folder / "bucket"), local)
        context = StorageContext(
            storage_path="results" if in_cloud else str(folder / "results"),
            experiment_dir_name="experiment",
            trial_dir_name="trial",
            **cloud,
        )
        self.directory = Path(folder / "bucket" if in_cloud else "/", context.trial_fs_path)
        self.coordinator = Coordinator(self.workers.group)
        self.context = context
        self.next_trial()
        (folder / "made").mkdir()
        (folder / "made" / "weights").write_text("w")
        self.made = str(folder / "made")

    def next_trial(self) -> None:
        self.coordinator.set_trial(REQUEST, TrialStorage(self.context, "node 0"))

    def make_storage_impossible(self) -> None:
        """Create a file where the trial's directory should be: an error for root, too."""
        self.directory.parent.mkdir(parents=True, exist_ok=True)
        self.directory.write_text("")

    @property
    def all_killed(self) -> bool:
        return all(actor.called("kill") for actor in self.actors)


@pytest.fixture(params=[False, True], ids=["disk", "cloud"])
def trial(
    request: pytest.FixtureRequest, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Trial:
    monkeypatch.setattr(queries, "driver_node_id", lambda: "node 0")
    # The default is below the directory of a Ray session.
    monkeypatch.setattr(StorageContext, "trial_working_directory", str(tmp_path / "working"))
    return Trial(clock, tmp_path, in_cloud=request.param)


def stop_at_once(trial: Trial) -> None:
    for actor in trial.actors:
        actor.replies["stop_training"] = lambda actor=actor: actor.reply_to_poll(
            LogChunk(actor.rank, b"stopped\n"), Finished(actor.rank, has_returned=False)
        )


def test_a_trial_that_is_stopped_in_its_report_leaves_its_workers_to_the_next(trial: Trial) -> None:
    stop_at_once(trial)
    for number in (1, 2):
        trial.actors[0].reply_to_poll(
            LogChunk(0, b"trial %d\n" % number), Report(1, {"n": number}, trial.made)
        )
        metrics, checkpoint = trial.coordinator.next_result() or ({}, None)
        assert metrics["n"] == number and checkpoint is not None
        assert metrics["hosts"] == "host0:1,host1:1"
        assert checkpoint.path.endswith(f"trial/{metrics['checkpoint_dir_name']}")
        assert (trial.directory / metrics["checkpoint_dir_name"] / "weights").read_text() == "w"
        trial.coordinator.end_trial()
        trial.next_trial()
    assert (trial.directory / "rank_0.log").read_text() == "trial 1\nstopped\ntrial 2\nstopped\n"
    assert not trial.all_killed
    assert not any(actor.called("close_world") for actor in trial.actors)


def test_output_is_stored_while_the_next_report_is_awaited(trial: Trial) -> None:
    """Tune kills the coordinator of a trial that does not report soon after the end of the time budget."""
    trial.actors[0].reply_to_poll(LogChunk(0, b"printed\n"))
    held: list[bool] = []
    trial.workers.clock.call_later(20.0, lambda: held.append(bool(trial.workers.group.take_logs())))
    trial.workers.clock.call_later(21.0, lambda: trial.actors[0].reply_to_poll(Report(1, {})))
    assert trial.coordinator.next_result()
    assert held == [False]


def test_a_checkpoint_on_the_host_of_rank_0_is_fetched_from_there(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks on the coordinator's host were lost; a directory there may be of an earlier rank 0."""
    Path(trial.made, "weights").write_text("old")
    fetched: list[str] = []

    def fetch(node: str, source: str, target: str, **_: Any) -> None:
        fetched.append(f"{node}:{source}")
        Path(target).mkdir()
        Path(target, "weights").write_text("new")

    monkeypatch.setattr(node_transfer, "fetch_directory", fetch)
    monkeypatch.setattr(node_transfer, "call_on", lambda *_, **__: (1, 2))  # the original's fingerprint
    monkeypatch.setattr(queries, "private_directory", lambda: None)
    trial.coordinator.set_trial(REQUEST, TrialStorage(trial.context, "node 7"))
    monkeypatch.setattr(queries, "driver_node_id", lambda: "node 7")
    trial.actors[0].reply_to_poll(Report(1, {}, trial.made))
    metrics, _ = trial.coordinator.next_result() or ({}, None)
    assert fetched == [f"node 0:{trial.made}"]
    assert (trial.directory / metrics["checkpoint_dir_name"] / "weights").read_text() == "new"


def test_what_a_process_prints_while_it_exits_is_stored_and_its_warning_logged(
    trial: Trial, caplog: pytest.LogCaptureFixture
) -> None:
    stop_at_once(trial)
    trial.actors[0].reply_to_poll(LogChunk(0, b"printed\n"), Report(1, {}))
    trial.actors[0].replies["end_trial"] = [LogChunk(0, b"at exit\n")], "rank 0's process still ran"
    assert trial.coordinator.next_result()
    trial.coordinator.end_trial()
    assert (trial.directory / "rank_0.log").read_text() == "printed\nstopped\nat exit\n"
    assert "rank 0's process still ran" in caplog.messages and not trial.all_killed


def test_workers_that_do_not_end_their_ranks_are_replaced(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_at_once(trial)
    trial.actors[0].reply_to_poll(Report(1, {}))
    assert trial.coordinator.next_result()
    before = trial.actors
    trial.actors[1].die()
    new_workers(trial, monkeypatch, Report(1, {"n": 2}))
    trial.coordinator.end_trial()
    assert all(actor.called("kill") for actor in before)
    trial.next_trial()
    metrics, _ = trial.coordinator.next_result() or ({}, None)
    assert metrics["n"] == 2


def test_a_checkpoint_that_cannot_be_copied_is_an_error_and_no_report_is_released(trial: Trial) -> None:
    trial.make_storage_impossible()
    stop_at_once(trial)
    trial.actors[0].reply_to_poll(Report(1, {}, trial.made))
    with pytest.raises(OSError, match="trial"):
        trial.coordinator.next_result()
    assert not any(actor.called("acknowledge") for actor in trial.actors)
    trial.coordinator.close()
    assert trial.all_killed and trial.workers.launcher.is_closed


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("made", MetricsError, "rank 0 of 2 on host0 failed: the checkpoint .* contains 'pipe'"),
        ("missing", OSError, "/missing"),
    ],
)
def test_a_checkpoint_that_is_missing_or_holds_a_pipe_is_an_error(
    trial: Trial, name: str, error: type[Exception], text: str
) -> None:
    os.mkfifo(Path(trial.made, "pipe"))
    trial.actors[0].reply_to_poll(Report(1, {}, str(Path(trial.made).with_name(name))))
    with pytest.raises(error, match=text):
        trial.coordinator.next_result()


def test_logs_that_cannot_be_stored_hide_no_failure(trial: Trial, caplog: pytest.LogCaptureFixture) -> None:
    trial.make_storage_impossible()
    trial.actors[0].reply_to_poll(LogChunk(0, b"something\n"))
    trial.workers.clock.call_later(1.0, trial.actors[1].die)
    with pytest.raises(TrainingFailed, match="rank 1 of 2 on host1 died") as raised:
        trial.coordinator.next_result()
    assert raised.value.lost_nodes == ("node 1",), "by which Tune learns of a preemption"
    assert trial.all_killed
    assert sum("logs cannot be stored" in each.getMessage() for each in caplog.records) == 1


def test_logs_that_cannot_be_stored_fail_no_trial(trial: Trial) -> None:
    trial.make_storage_impossible()
    trial.actors[0].reply_to_poll(LogChunk(0, b"something\n"), Report(1, {"loss": 1.0}))
    metrics, _ = trial.coordinator.next_result() or ({}, None)
    assert metrics["loss"] == 1.0
    for actor in trial.actors:
        actor.reply_to_poll(LogChunk(actor.rank, b"something\n"), Finished(actor.rank))
    assert trial.coordinator.next_result() is None
    trial.coordinator.end_trial()
    assert not trial.all_killed


def raise_on_both_ranks(trial: Trial) -> None:
    for actor in trial.actors:
        cause = failed(actor.rank, FailureKind.RAISED, "ValueError: x")
        actor.reply_to_poll(LogChunk(actor.rank, b"last words\n"), cause)


def send_a_malformed_message(trial: Trial) -> None:
    trial.actors[1].reply_to_poll(LogChunk(1, b"last words\n"), b"\x80\x04.")  # type: ignore[arg-type]


def suspend_a_rank(trial: Trial) -> None:
    trial.workers.clock.call_later(1.0, trial.actors[1].suspend)


@pytest.mark.parametrize("end", [raise_on_both_ranks, send_a_malformed_message, suspend_a_rank])
def test_workers_of_a_failed_trial_are_killed_and_its_output_is_stored(
    trial: Trial, end: Callable[[Trial], None]
) -> None:
    trial.actors[0].reply_to_poll(LogChunk(0, b"printed\n"))
    end(trial)
    with pytest.raises(TrainingFailed):
        trial.coordinator.next_result()
    assert trial.all_killed and trial.workers.launcher.is_closed
    assert (trial.directory / "rank_0.log").read_text().startswith("printed\n")
    trial.coordinator.end_trial()  # as Tune does after a failure: no effect
    assert [len(actor.called("kill")) for actor in trial.actors] == [1, 1]


def test_an_error_while_workers_are_killed_hides_no_failure(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("Ray is gone")

    monkeypatch.setattr(trial.workers.group, "close", fail)
    trial.workers.clock.call_later(1.0, trial.actors[1].die)
    with pytest.raises(TrainingFailed, match="rank 1 of 2 on host1 died"):
        trial.coordinator.next_result()
    assert any("Ray is gone" in str(each.exc_info) for each in caplog.records)


def test_workers_that_cannot_be_stopped_are_killed(trial: Trial) -> None:
    trial.actors[0].reply_to_poll(Report(1, {}))
    trial.coordinator.next_result()
    trial.actors[1].reply_to_poll(b"no message")  # type: ignore[arg-type]
    with pytest.raises(TrainingFailed, match="malformed message"):
        trial.coordinator.close()
    assert trial.all_killed and trial.workers.launcher.is_closed


def new_workers(trial: Trial, monkeypatch: pytest.MonkeyPatch, message: Any) -> None:
    """Make the launcher create new workers next; the first one sends ``message``."""

    def create() -> Any:
        actors = trial.workers.launcher.start()
        actors[0].reply_to_poll(message)
        return actors

    monkeypatch.setattr(trial.workers.launcher, "create", create)


def test_a_failed_start_is_an_error_and_the_next_trial_gets_new_workers(
    trial: Trial, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial.actors[1].suspend()
    with pytest.raises(StartFailed):
        trial.coordinator.next_result()
    assert trial.all_killed
    new_workers(trial, monkeypatch, Report(1, {"n": 2}))
    trial.next_trial()
    metrics, _ = trial.coordinator.next_result() or ({}, None)
    assert metrics["n"] == 2
