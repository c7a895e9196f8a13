"""The coordinator with workers and a storage that do as a test says: what is told, and what is cleaned up."""

from __future__ import annotations

import inspect
import logging

import pytest

from horovod_tune.coordinator.coordinator import Coordinator
from horovod_tune.coordinator.trial_storage import TrialStorage
from horovod_tune.coordinator.worker_group import WorkerGroup
from horovod_tune.errors import StartFailed, TrainingFailed
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

    def close(self):
        self.is_closed = True


def test_the_fake_storage_has_the_real_ones_methods():
    for name in ("append_log", "publish_logs", "persist", "close"):
        fake, real = (inspect.signature(getattr(each, name)) for each in (FakeStorage, TrialStorage))
        assert list(fake.parameters) == list(real.parameters)


def begin(group, storage, *, reuse_workers=True):
    coordinator = Coordinator(group, b"function", reuse_workers=reuse_workers)
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


def test_the_ranks_go_on_after_each_report_with_the_place_of_its_checkpoint():
    group = FakeGroup(Report(1, {"loss": 1.0}), Report(2, {"loss": 0.5}, "/made"), Finished(0))
    proceeded = []
    group.proceed = lambda index, checkpoint: proceeded.append((index, checkpoint))
    coordinator = begin(group, FakeStorage())
    while coordinator.next_result() is not None:
        pass
    assert proceeded == [(1, None), (2, CheckpointPlace("/stored"))]


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
