"""The coordinator with workers and a storage that do as a test says: what is told, and what is cleaned up."""

from __future__ import annotations

import inspect
import logging
import os
import threading
from pathlib import Path

import pytest

from horovod_tune.coordinator.coordinator import Coordinator
from horovod_tune.coordinator.trial_storage import TrialStorage
from horovod_tune.coordinator.uploads import Upload
from horovod_tune.coordinator.worker_group import WorkerGroup
from horovod_tune.errors import MetricsError, StartFailed, TrainingFailed
from horovod_tune.messages import CheckpointPlace, Finished, LogChunk, Report, TrialRequest

FULL = OSError(28, "No space left on device")
ORDER = TrialRequest("id", "name", "dir", "work", "experiment", {}, None)


class FakeGroup:
    """Workers whose events are a list; an exception in it is raised. Notes what is called, in ``calls``."""

    hosts = ("a", "a", "b")

    def __init__(self, *events):
        self.change_facts = {}
        self.events = list(events)
        self.logs = [LogChunk(0, b"printed\n")]
        self.calls = []
        self.problems = []
        self.errors = {}

    def __getattr__(self, name):
        assert name in vars(WorkerGroup), f"a worker group has no {name}"
        signature = inspect.signature(getattr(WorkerGroup, name))

        def call(*args, **keywords):
            signature.bind(self, *args, **keywords)
            self.calls.append(name)
            if name in self.errors:
                raise self.errors[name]

        return call

    def begin(self, order):
        self.calls.append("begin")
        if "begin" in self.errors:
            raise self.errors["begin"]

    def next_event(self):
        event = self.events.pop(0)
        if isinstance(event, Exception):
            raise event
        return event

    def take_logs(self):
        logs, self.logs = self.logs, []
        return logs

    def end_trial(self):
        self.calls.append("end_trial")
        return self.problems

    def unwind(self):
        self.calls.append("unwind")
        if "unwind" in self.errors:
            raise self.errors["unwind"]
        self.logs.append(LogChunk(1, b"unwound\n"))
        return []


class FakeStorage:
    """A trial's storage in memory; ``errors`` by method are raised."""

    def __init__(self, **errors):
        self.errors = errors
        self.written, self.published, self.persisted, self.is_closed = {}, {}, [], False
        self.is_elsewhere, self.uploads, self.may_arrive = False, [], threading.Event()
        self.timeout_s = 60.0

    def _may_fail(self, name):
        if name in self.errors:
            raise self.errors[name]

    def append_log(self, rank, text):
        self._may_fail("append_log")
        self.written[rank] = self.written.get(rank, b"") + text

    def publish_logs(self, *, at_end=False):
        self._may_fail("publish_logs")
        self.published = dict(self.written)

    def persist(self, directory, metrics):
        self._may_fail("persist")
        self.persisted.append(directory)
        return f"stored {directory}", CheckpointPlace("/stored")

    def begin_upload(self, directory, metrics):
        copy = self.copies / str(len(self.uploads))
        place = CheckpointPlace("/uploaded")
        upload = Upload(directory, copy, self._send, "stored", place, timeout_s=self.timeout_s)
        self.uploads.append(upload)
        return upload

    def _send(self, directory):
        assert self.may_arrive.wait(20)
        self._may_fail("send")
        self.persisted.append((Path(directory) / "weights").read_text())

    def close(self):
        self.is_closed = True


def test_the_fake_storage_has_the_real_ones_methods():
    for name in ("append_log", "publish_logs", "persist", "begin_upload", "close"):
        fake, real = (inspect.signature(getattr(each, name)) for each in (FakeStorage, TrialStorage))
        assert list(fake.parameters) == list(real.parameters)


def begin(group, storage, *, reuse_workers=True, background_uploads=False):
    coordinator = Coordinator(
        group, b"function", reuse_workers=reuse_workers, background_uploads=background_uploads
    )
    coordinator.set_trial(ORDER, storage)
    return coordinator


BROKEN = [{"append_log": FULL}, {"publish_logs": OSError(30, "Read-only file system")}]
BROKEN += [{"append_log": FULL, "publish_logs": RuntimeError("the host is gone")}]


@pytest.mark.parametrize("errors", BROKEN)
@pytest.mark.parametrize("cause", [TrainingFailed("rank 1 of 3 on b died"), StartFailed("too slow")])
def test_a_log_that_cannot_be_kept_hides_no_cause_and_skips_no_clean_up(errors, cause, caplog):
    group, storage = FakeGroup(cause), FakeStorage(**errors)
    coordinator = begin(group, storage)
    with pytest.raises(type(cause)) as raised:
        coordinator.next_result()
    assert raised.value is cause
    assert "close" in group.calls and storage.is_closed
    warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 1 and "logs cannot be stored" in warnings[0].getMessage()


def test_a_preempted_trial_stays_one_with_a_full_disk():
    cause = TrainingFailed("rank 1 of 3 on b died")
    cause.lost_nodes = ("node b",)
    with pytest.raises(TrainingFailed) as raised:
        begin(FakeGroup(cause), FakeStorage(append_log=FULL)).next_result()
    assert raised.value.lost_nodes == ("node b",)


@pytest.mark.parametrize("errors", BROKEN)
def test_a_log_that_cannot_be_kept_fails_no_trial(errors, caplog):
    events = (Report(1, {"loss": 1.0}, "/made"), Report(2, {"loss": 0.5}), Finished(0))
    group, storage = FakeGroup(*events), FakeStorage(**errors)
    coordinator = begin(group, storage)
    metrics, checkpoint = coordinator.next_result()
    assert (metrics["loss"], metrics["hosts"], checkpoint) == (1.0, "a:2,b:1", "stored /made")
    group.logs.append(LogChunk(2, b"more\n"))
    assert coordinator.next_result()[0]["loss"] == 0.5
    assert coordinator.next_result() is None
    coordinator.end_trial()
    coordinator.close()
    assert group.calls.count("close") == 1 and "end_trial" in group.calls
    told = [each for each in caplog.records if "logs cannot be stored" in each.getMessage()]
    assert len(told) == 1, "once a trial"


def test_workers_that_cannot_be_ended_hide_no_cause(caplog):
    cause = TrainingFailed("rank 0 raised")
    group = FakeGroup(cause)
    group.errors["close"] = RuntimeError("Ray is gone")
    with pytest.raises(TrainingFailed) as raised:
        begin(group, FakeStorage()).next_result()
    assert raised.value is cause
    assert any("Ray is gone" in str(each.exc_info) for each in caplog.records)


def test_a_checkpoint_that_cannot_be_stored_is_the_cause():
    coordinator = begin(group := FakeGroup(Report(1, {}, "/made")), FakeStorage(persist=FULL))
    with pytest.raises(OSError, match="No space left"):
        coordinator.next_result()
    assert "proceed" not in group.calls
    coordinator.close()
    assert group.calls[-2:] == ["unwind", "close"]


def test_workers_are_ended_though_they_cannot_be_unwound():
    group, storage = FakeGroup(Report(1, {})), FakeStorage()
    coordinator = begin(group, storage)
    coordinator.next_result()
    group.errors["unwind"] = TrainingFailed("received a malformed message on a rank's socket")
    with pytest.raises(TrainingFailed):
        coordinator.close()
    assert group.calls[-1] == "close" and storage.is_closed


@pytest.mark.parametrize("reuse_workers", [True, False])
def test_what_a_stopped_trial_printed_last_is_kept(reuse_workers):
    group, storage = FakeGroup(Report(1, {})), FakeStorage()
    coordinator = begin(group, storage, reuse_workers=reuse_workers)
    coordinator.next_result()
    if reuse_workers:
        group.logs.append(LogChunk(1, b"unwound\n"))
    coordinator.end_trial()
    assert storage.published == {0: b"printed\n", 1: b"unwound\n"} and storage.is_closed
    assert ("close" in group.calls) == (not reuse_workers)


def test_a_start_that_fails_is_told_and_the_next_trial_gets_new_workers():
    group = FakeGroup(Finished(0))
    group.errors["begin"] = StartFailed("did not come up")
    coordinator = begin(group, FakeStorage())
    with pytest.raises(StartFailed):
        coordinator.next_result()
    assert "unwind" not in group.calls, "nothing was begun"
    assert group.calls[-1] == "close"
    del group.errors["begin"]
    coordinator.set_trial(ORDER, FakeStorage())
    assert coordinator.next_result() is None


@pytest.fixture
def uploading(tmp_path):
    """A coordinator whose rank 0 reports a checkpoint, nothing and another one, to a storage elsewhere."""
    directory = tmp_path / "rank 0"
    directory.mkdir()
    (directory / "weights").write_text("of report 1")
    group = FakeGroup(Report(1, {}, str(directory)), Report(2, {}, None), Report(3, {}, str(directory)))
    told = []
    group.proceed = lambda index, place: told.append((index, place and place.path))
    storage = FakeStorage()
    storage.is_elsewhere, storage.copies = True, tmp_path / "copies"
    yield begin(group, storage, background_uploads=True), storage, directory / "weights", told
    storage.may_arrive.set()


def test_ranks_go_on_while_a_copy_of_their_checkpoint_travels(uploading):
    coordinator, storage, weights, told = uploading
    _, upload = coordinator.next_result()
    weights.write_text("of report 3")  # the function may write there again
    _, checkpoint = coordinator.next_result()
    assert checkpoint is None
    assert told == [(1, None), (2, None)] and not upload.is_over
    storage.may_arrive.set()
    _, second = coordinator.next_result()
    assert upload.is_over and told[2] == (3, "/uploaded"), "one at a time, and the ranks are told"
    second.wait()
    assert storage.persisted == ["of report 1", "of report 3"]
    assert list(storage.copies.iterdir()) == []


def test_a_storage_on_this_host_has_the_checkpoint_when_the_report_returns(uploading):
    coordinator, storage, _, told = uploading
    storage.is_elsewhere = False
    _, checkpoint = coordinator.next_result()
    assert checkpoint.startswith("stored") and told == [(1, "/stored")]


def test_an_upload_that_fails_is_told_once_with_the_next_checkpoint(uploading, caplog):
    coordinator, storage, _, _ = uploading
    storage.errors["send"] = FULL
    _, upload = coordinator.next_result()
    storage.may_arrive.set()
    with pytest.raises(OSError, match="No space left"):
        upload.wait()
    with pytest.raises(OSError, match="No space left"):
        coordinator.next_result()
    coordinator.close()
    assert "did not arrive" not in caplog.text


def test_the_end_of_a_trial_waits_for_its_upload_and_logs_that_it_failed(uploading, caplog):
    coordinator, storage, _, _ = uploading
    storage.errors["send"] = FULL
    coordinator.next_result()
    threading.Timer(0.2, storage.may_arrive.set).start()
    coordinator.close()
    assert "did not arrive" in caplog.text and storage.is_closed


def test_a_storage_that_never_answers_is_waited_for_so_long(uploading):
    coordinator, storage, _, _ = uploading
    storage.timeout_s = 0.1
    _, upload = coordinator.next_result()
    with pytest.raises(TimeoutError, match="has not taken /uploaded"):
        upload.wait()


def test_what_cannot_be_copied_is_the_reports_error_at_once(uploading):
    coordinator, _, weights, _ = uploading
    weights.unlink()
    os.mkfifo(weights)
    with pytest.raises(MetricsError, match="a pipe or a device"):
        coordinator.next_result()
