"""report() and get_checkpoint() inside one rank, without Ray."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import decimal
import enum
import os
import sys
import threading
import types
from pathlib import Path

import numpy
import pyarrow.fs
import pytest
import ray.tune
import torch
from processes import eventually

import horovod_tune
from horovod_tune.channel.packing import pack, unpack
from horovod_tune.errors import MetricsError, NotInTraining
from horovod_tune.messages import CheckpointPlace, LongWait, RankInfo, TrialRequest
from horovod_tune.ray_compat import tune_session
from horovod_tune.session import session as session_module
from horovod_tune.session.committed_state import CommittedState, States
from horovod_tune.session.reported_values import MAX_DEPTH, plain_metrics
from horovod_tune.session.session import Session, StopTraining


def open_place(place):
    return ray.tune.Checkpoint(place.path, place.filesystem)


def make_session(rank=0, fetch=open_place):
    request = TrialRequest("id", "name", "dir", "work", "experiment", {"lr": 0.1}, b"")
    sent = []
    world = RankInfo(rank, 2, rank, 2, 0, 1)
    return Session(request, world, send=sent.append, fetch=fetch), sent


@contextlib.contextmanager
def active(live):
    session_module.activate(live)
    try:
        yield
    finally:
        session_module.activate(None)


def test_outside_a_trial_both_raise_not_in_training():
    with pytest.raises(NotInTraining, match=r"report\(\) works only inside"):
        horovod_tune.report(loss=1)
    with pytest.raises(NotInTraining, match=r"get_checkpoint\(\) works only inside"):
        horovod_tune.get_checkpoint()


def test_a_forked_process_is_told_its_own_rank_without_environment_variables(monkeypatch):
    live, _ = make_session()
    for other in ("", "1:2"):  # of another rank in the process, see TPU v2 and v3
        monkeypatch.setenv(session_module.RANK_VARIABLE, other)
        monkeypatch.setattr(os, "getpid", lambda: live.pid + 1)
        for call in (live.get_checkpoint, lambda: live.report({})):
            with pytest.raises(NotInTraining, match=rf"function of rank 0 \(process {live.pid}\) started"):
                call()


def test_a_world_is_read_whole_while_another_thread_joins_the_next_one():
    live, _ = make_session()
    world = live.rank_info

    def read():
        with active(live):
            return horovod_tune.get_world()

    with live._condition:
        thread, outcome = _in_thread(read)
        thread.join(0.1)
        live.join_world(dataclasses.replace(world, rank=1, size=3), number=1, reports=0, resources=b"")
    thread.join(10)
    assert outcome == [session_module.TrialWorld(1, 3, 1, None)]


def test_a_failed_collective_is_remembered_until_the_next_world():
    live, _ = make_session()
    live.break_world(was_unnoticed=True)
    live.break_world()  # as the coordinator does when it learns of it
    assert live.failed_unnoticed
    live.join_world(live.rank_info, number=1, reports=0, resources=b"")
    assert not live.failed_unnoticed


class Phase(enum.IntEnum):
    TRAINING = 1


class Kind(str, enum.Enum):
    MODEL = "model"


Pair = collections.namedtuple("Pair", "step loss")
OfTheScript = type("OfTheScript", (), {"__module__": "__main__"})
vars(sys.modules["__main__"])["OfTheScript"] = OfTheScript  # where Pickle finds it


def test_numbers_of_numpy_and_torch_become_pythons():
    plain = plain_metrics(
        {
            "f32": numpy.float32(0.5),
            "i64": numpy.int64(3),
            "flag": numpy.bool_(True),
            "zero_d": numpy.array(2.5),
            "tensor": torch.tensor(0.25, requires_grad=True),
            "one": torch.tensor([4]),
            "nested": {"a": numpy.float64(1.0)},
            "list": [torch.tensor(1), 2],
            "text": "abc",
            "none": None,
            "f128": numpy.longdouble(0.5),
            "c256": [numpy.array(numpy.clongdouble(0.5j))],
            "decimal": decimal.Decimal("0.5"),
            "phase": Phase.TRAINING,
            "kind": Kind.MODEL,
            "pair": Pair(1, numpy.float32(0.5)),
        }
    )
    assert plain == {
        "f32": 0.5, "i64": 3, "flag": True, "zero_d": 2.5, "tensor": 0.25, "one": 4,
        "nested": {"a": 1.0}, "list": [1, 2], "text": "abc", "none": None,
        "f128": 0.5, "c256": [0.5j], "decimal": 0.5, "phase": 1, "kind": "model", "pair": (1, 0.5),
    }  # fmt: skip
    assert [type(plain[name]) for name in ("f32", "i64", "flag", "zero_d")] == [float, int, bool, float]
    assert [type(plain[name]) for name in ("f128", "decimal")] == [float, float]
    assert [type(plain[name]) for name in ("phase", "kind", "pair")] == [int, str, tuple]
    assert type(plain["c256"][0]) is complex
    assert type(plain["nested"]["a"]) is float and type(plain["list"][0]) is int


def test_keys_of_numpy_and_of_subclasses_become_pythons():
    """As of the dict that `numpy.unique` gives for each class."""
    flags = numpy.array([True])
    plain = plain_metrics(
        {
            numpy.str_("top"): 1.0,
            Kind.MODEL: 2.0,
            "words": {name: 0.5 for name in numpy.unique(["cat", "dog"])},
            "numbers": [{n: {numpy.float32(0.5): 1} for n in numpy.unique([3, 4])}],
            "flags": {flags[0]: 1},
            "of subclasses": {Kind.MODEL: 1, Phase.TRAINING: 2},
            "plain": {"a": 1, 2: 3, 0.5: 4, False: 5, None: 6},
        }
    )
    assert repr(plain) == repr(
        {
            "top": 1.0,
            "model": 2.0,
            "words": {"cat": 0.5, "dog": 0.5},
            "numbers": [{3: {0.5: 1}, 4: {0.5: 1}}],
            "flags": {True: 1},
            "of subclasses": {"model": 1, 1: 2},
            "plain": {"a": 1, 2: 3, 0.5: 4, False: 5, None: 6},
        }
    )
    assert unpack(pack(plain)) == plain


KINDS = (lambda value: [value], lambda value: (value,), lambda value: {"k": value})


def nested(levels, kind):
    value = 1.0
    for _ in range(levels):
        value = kind(value)
    return value


@pytest.mark.parametrize(
    ("metrics", "parts"),
    [
        ({"weights": torch.zeros(2, 3)}, ["'weights'", "(2, 3)"]),
        ({"inner": {"lock": threading.Lock()}}, ["'inner/lock'", "lock"]),
        ({"f": [lambda: 1]}, ["'f[0]'", "function"]),
        ({"z": numpy.complex64(1j)}, ["'z'", "complex"]),
        ({3: 1.0}, ["name of a metric", "3"]),
        ({"count": numpy.array(2**70, dtype=object)}, ["'count'", "71 bits"]),
        ({"lock": numpy.array(threading.Lock(), dtype=object)}, ["'lock'", "lock"]),
        ({"counts": {2**64: 1}}, ["'counts'", "key", "65 bits"]),
        ({"color": OfTheScript()}, ["metric 'color' is of type OfTheScript, which only your script knows"]),
        ({"text": "\ud800"}, ["'text'", "surrogates"]),
        ({"\udcff": 1.0}, ["\\udcff", "surrogates"]),
        ({"inner": {"\udcff": 1.0}}, ["'inner'", "key", "surrogates"]),
        ({"loss": torch.empty(1, device="meta")}, ["'loss'", "meta"]),
        ({"acc": {("a", "b"): 0.5}}, ["'acc'", "key ('a', 'b'), of type tuple"]),
        ({"acc": [{"of": {b"cat": 0.5}}]}, ["'acc[0]/of'", "key b'cat', of type bytes"]),
        ({"acc": {numpy.bytes_(b"cat"): 0.5}}, ["'acc'", "b'cat'", "of type bytes_"]),
        ({"acc": {torch.tensor(1): 0.5}}, ["'acc'", "key tensor(1), of type Tensor"]),
        ({"acc": {numpy.str_("\udcff"): 0.5}}, ["'acc'", "key", "surrogates"]),
        ({numpy.int64(3): 1.0}, ["name of a metric", "3"]),
        ({"count": 2**64}, ["metric 'count'", "integer of 65 bits"]),
        ({"count": -(2**63) - 1}, ["metric 'count'", "integer of 64 bits"]),
        ({"count": 2**200}, ["metric 'count'", "integer of 201 bits"]),
        ({"count": 10**400}, ["metric 'count'", "integer of 1329 bits"]),
        ({"count": {"a": 2**64}}, ["metric 'count/a'", "integer of 65 bits"]),
        ({"count": [1, 2**70]}, ["metric 'count[1]'", "integer of 71 bits"]),
        *(
            ({"deep": nested(levels, kind)}, ["'deep", "nested more than 32 deep"])
            for levels in (MAX_DEPTH + 1, 500)
            for kind in KINDS
        ),
    ],
)
def test_what_cannot_be_sent_is_named(metrics, parts):
    with pytest.raises(MetricsError) as raised:
        plain_metrics(metrics)
    for part in parts:
        assert part in str(raised.value)


def test_a_checkpoint_must_be_a_directory_on_this_host(tmp_path):
    live, sent = make_session()
    missing = tmp_path / "none"
    with pytest.raises(MetricsError, match="none' does not exist"):
        live.report({}, str(missing))
    lagging, _ = make_session(rank=1)
    lagging.acknowledge(1)
    lagging.report({}, str(missing))  # it is on rank 0's host
    missing.touch()
    with pytest.raises(MetricsError, match="none' is a file"):
        live.report({}, missing)
    with pytest.raises(MetricsError, match="directory"):
        live.report({}, checkpoint=3)
    for empty in ("", OtherPath("")):  # not the working directory, which is one
        with pytest.raises(MetricsError, match=r"directory on this host, got ''; pass None"):
            live.report({}, checkpoint=empty)
    remote = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    with pytest.raises(MetricsError, match=r"subtree file system.*to_directory\(\)"):
        live.report({}, ray.tune.Checkpoint(path="some/where", filesystem=remote))
    assert sent == []


class OtherPath:
    """An os.PathLike that is neither str nor Path."""

    def __init__(self, path):
        self._path = path

    def __fspath__(self):
        return self._path


@pytest.mark.parametrize(
    "form",
    [
        str,
        Path,
        OtherPath,
        lambda path: OtherPath(os.fsencode(path)),
        os.path.relpath,
        ray.tune.Checkpoint.from_directory,
        lambda path: ray.tune.Checkpoint(f"file://{path}"),
        lambda path: ray.tune.Checkpoint.from_directory(os.path.relpath(path)),
    ],
)
def test_a_checkpoint_may_be_any_path_or_rays_checkpoint(form, tmp_path):
    live, sent = make_session()
    live.acknowledge(1)
    live.report({}, form(str(tmp_path)))
    assert sent[0].checkpoint_path == str(tmp_path)


def _in_thread(function):
    outcome = []

    def run():
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def test_no_rank_passes_its_report_before_it_is_acknowledged():
    for rank in (0, 1):
        live, sent = make_session(rank)
        thread, outcome = _in_thread(lambda live=live: live.report({"loss": 1}))
        eventually(lambda live=live: live.reports == 1)
        assert len(sent) == (1 if rank == 0 else 0)
        live.acknowledge(0)
        thread.join(0.05)
        assert thread.is_alive()
        live.acknowledge(1)
        thread.join(10)
        assert outcome == [None]


def test_a_report_that_waits_in_a_broken_world_raises():
    live, sent = make_session()
    thread, outcome = _in_thread(lambda: live.report({"loss": 1}))
    eventually(lambda: sent)
    live.break_world()
    thread.join(10)
    assert isinstance(outcome[0], session_module.WorldBroken)


def test_a_stopped_report_unwinds_the_function_but_not_through_except_exception():
    live, _ = make_session()

    def function():
        try:
            live.report({"loss": 1})
        except Exception:
            return "swallowed"

    thread, outcome = _in_thread(function)
    eventually(lambda: live.reports == 1)
    live.stop()
    thread.join(10)
    assert isinstance(outcome[0], StopTraining)


@pytest.mark.parametrize("report", ["horovod_tune", "ray"])
def test_metrics_may_be_given_by_name(report):
    live, sent = make_session()
    reporting = {"horovod_tune": horovod_tune.report, "ray": _rays_report(live)}[report]
    live.acknowledge(3)
    with active(live):
        reporting(metrics={"loss": 1}, epoch=2)
        with pytest.raises(MetricsError, match=r"must be a dict, got float; .* report\(\{'metrics'"):
            reporting(metrics=0.5)
        reporting({"metrics": 0.5})
        if report == "horovod_tune":
            reporting({"a": 1}, b=2)
    expected = [{"loss": 1, "epoch": 2}, {"metrics": 0.5}, {"a": 1, "b": 2}]
    assert [(each.index, each.metrics) for each in sent] == list(enumerate(expected[: len(sent)], 1))
    assert len(sent) == (3 if report == "horovod_tune" else 2)


def _rays_report(live):
    """``ray.tune.report`` as a rank has it, without changing this process's own."""
    module = types.SimpleNamespace(
        report=lambda metrics, *, checkpoint=None: live.report(metrics, checkpoint)
    )
    tune_session._accept_keywords(module)
    return module.report


def test_a_rank_that_lags_behind_finds_the_checkpoint_of_its_own_time():
    live, _ = make_session(rank=1)
    live.acknowledge(2, CheckpointPlace("/second", report=2))
    live.acknowledge(1, CheckpointPlace("/first", report=1))
    found = [live.get_checkpoint()]
    for _ in range(2):
        live.report({"loss": 1})
        found.append(live.get_checkpoint())
    assert [each and each.path for each in found] == [None, "/first", "/second"]


def test_in_a_new_world_the_checkpoint_is_that_of_its_reports_and_is_fetched_again():
    fetched = []
    live, _ = make_session(rank=1, fetch=lambda place: fetched.append(place.path) or open_place(place))
    for report in (1, 2, 3):  # by rank 0 only
        live.acknowledge(report, CheckpointPlace(f"/{report}", report=report))
    for number, reports in enumerate((2, 2, 3), 1):
        live.join_world(live.rank_info, number=number, reports=reports, resources=b"")
        live.get_checkpoint()
    assert fetched == ["/2", "/2", "/3"]


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_checkpoint_that_was_made_from_a_commit_is_for_get_state_only(tmp_path, is_remote):
    bucket = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem()) if is_remote else None
    for number, name in enumerate(("weights", session_module.COMMIT_FILE), 1):
        live, _ = make_session()
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / name).write_bytes(b"stored")
        path = str(number) if is_remote else str(tmp_path / str(number))
        live.acknowledge(1, CheckpointPlace(path, filesystem=bucket, report=1))
        live.report({"loss": 1})
        found = live.get_checkpoint()
        assert (found and found.path, live.stored_commit()) == [(path, None), (None, b"stored")][number - 1]


def test_a_commit_after_a_restart_replaces_the_one_that_was_stored():
    alone = types.SimpleNamespace(
        are_ready=lambda: True, any=lambda flag: flag, gather=lambda number: [number]
    )
    before = CommittedState(alone, States())
    before.commit({"epoch": 5})
    restarted = CommittedState(alone, States(), stored=before.dump)
    restarted.commit({"epoch": 6})
    assert restarted.get() == {"epoch": 6}


def test_the_largest_and_the_deepest_metrics_are_sent():
    largest = {"a": 2**64 - 1, "b": -(2**63), "c": True}
    assert plain_metrics(largest) == largest
    assert all(plain_metrics({"deep": nested(MAX_DEPTH, kind)}) for kind in KINDS)


@pytest.mark.parametrize(
    "value",
    ["x" * (65 << 20), [b"x" * (33 << 20)] * 2, {"a": numpy.zeros(9 << 20)}],
    ids=["text", "list", "array"],
)
def test_metrics_larger_than_a_report_may_be_are_refused_by_name(value):
    with pytest.raises(MetricsError, match=r"64 MB; with 'large'.*checkpoint"):
        plain_metrics({"loss": 0.5, "large": value})


def test_a_number_may_be_returned_and_an_empty_dict_is_no_report():
    live, sent = make_session()
    live.acknowledge(3)
    for output in (numpy.float32(0.5), 0, {}, None):
        session_module.handle_output(live, output)
    assert [each.metrics for each in sent] == [{"_metric": 0.5}, {"_metric": 0}]


@pytest.mark.parametrize(("rank", "sent"), [(0, []), (1, [LongWait(1, 1)])])
def test_a_rank_that_waits_long_in_a_report_says_so_except_rank_0(monkeypatch, rank, sent):
    monkeypatch.setattr(session_module, "LONG_WAIT_S", 0.05)
    live, messages = make_session(rank)
    thread, _ = _in_thread(lambda: live.report({"loss": 1}))
    thread.join(0.3)
    live.acknowledge(1)
    thread.join(10)
    assert [each for each in messages if isinstance(each, LongWait)] == sent
