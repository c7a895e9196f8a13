"""One contract for workers: the same trials on Horovod, torch.distributed, plain processes and torch_xla.

Each kind runs where what it needs is installed, torch_xla on its CPU device.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import ray
from processes import rank_processes, see_them_gone, template_processes
from worker_kinds import NEEDS, Workers, skip_unless_installed

from horovod_tune.errors import TrainingFailed
from horovod_tune.messages import CheckpointPlace, Finished, LogChunk, Report

pytestmark = pytest.mark.processes

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module", params=list(NEEDS))
def kind(request: pytest.FixtureRequest) -> str:
    skip_unless_installed(request.param)
    return str(request.param)


@pytest.fixture(scope="module")
def workers(ray_session: Any, kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    """Workers that tests share: each leaves them fit for the next trial."""
    made = Workers(kind, tmp_path_factory.mktemp(kind))
    yield made
    made.close()


@pytest.fixture
def own_workers(ray_session: Any, kind: str, tmp_path: Path) -> Iterator[Callable[..., Workers]]:
    """Makes workers for a test that breaks them."""
    made: list[Workers] = []

    def make(**options: Any) -> Workers:
        made.append(Workers(kind, tmp_path, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def note_rank(config: dict[str, Any]) -> None:
    """Write the rank's process and world to a file for the test."""
    from horovod_tune.session import session

    live = session.current()
    assert live is not None
    world = live.rank_info
    facts = {"pid": os.getpid(), "size": world.size, "local_rank": world.local_rank, "cwd": os.getcwd()}
    Path(f"rank_{world.rank}.json").write_text(json.dumps(facts))


def noted(directory: Path) -> dict[int, dict[str, Any]]:
    return {int(path.stem[5:]): json.loads(path.read_text()) for path in directory.glob("rank_*.json")}


def rank_here() -> int:
    from horovod_tune import get_world

    return get_world().rank


def test_every_rank_runs_the_function_once_in_the_trials_directory(workers: Workers) -> None:
    directory, events = workers.run(note_rank)
    assert events == [Finished(0)]
    facts = noted(directory)
    assert sorted(facts) == list(range(workers.size))
    assert {each["size"] for each in facts.values()} == {workers.size}
    assert {each["cwd"] for each in facts.values()} == {str(directory)}
    assert [facts[rank]["local_rank"] for rank in sorted(facts)] == list(range(workers.size))


def test_a_report_of_all_ranks_arrives_once_and_is_rank_0s(workers: Workers) -> None:
    def train(config: dict[str, Any]) -> None:
        from horovod_tune import report

        for epoch in range(3 + rank_here()):  # the last report of rank 1 returns when rank 0 has finished
            report(rank=rank_here(), epoch=epoch)

    _, events = workers.run(train)
    assert events == [*(Report(i + 1, {"rank": 0, "epoch": i}) for i in range(3)), Finished(0)]


def test_a_function_may_report_on_rank_0_only(workers: Workers) -> None:
    def train(config: dict[str, Any]) -> None:
        from horovod_tune import report

        if rank_here() == 0:
            report(loss=0.5)
            report(loss=0.25)

    _, events = workers.run(train)
    assert [event.metrics["loss"] for event in events[:-1]] == [0.5, 0.25]


def test_metrics_keep_their_types(workers: Workers) -> None:
    sent = {
        "whole": 3,
        "large": 1 << 63,
        "real": 0.1,
        "no_number": float("inf"),
        "text": "ü",
        "raw": b"\x00\xff",
        "nothing": None,
        "yes": True,
        "listed": [1, 2.5, (3, "x")],
        "nested": {"accuracy": {"top1": 0.5}},
    }

    def train(config: dict[str, Any]) -> None:
        import numpy

        from horovod_tune import report

        report({**config["sent"], "scalar": numpy.float32(0.5), "row": numpy.arange(3, dtype="int16")})

    _, events = workers.run(train, sent=sent)
    metrics = dict(events[0].metrics)
    row = metrics.pop("row")
    assert (row.dtype, row.tolist()) == ("int16", [0, 1, 2])
    assert metrics == {**sent, "scalar": 0.5}
    assert {name: type(value) for name, value in metrics.items()} == {
        name: type(value) for name, value in {**sent, "scalar": 0.5}.items()
    }


def test_a_stopped_trial_stops_at_its_report_on_every_rank(workers: Workers) -> None:
    def train(config: dict[str, Any]) -> None:
        from horovod_tune import report

        report(step=1)
        Path(f"rank_{rank_here()}_went_on").touch()
        report(step=2)

    directory = workers.begin(train)
    assert isinstance(workers.group.next_event(), Report)
    assert workers.group.end_trial()
    assert list(directory.glob("*_went_on")) == []


def test_each_trial_runs_in_processes_of_its_own_that_end_with_it(workers: Workers) -> None:
    pids: list[int] = []
    for _ in range(3):
        directory, _ = workers.run(note_rank)
        pids += [facts["pid"] for facts in noted(directory).values()]
        assert not any(map(psutil.pid_exists, pids))
    assert len(set(pids)) == 3 * workers.size


def test_what_a_trial_changes_in_its_process_does_not_reach_the_next(workers: Workers) -> None:
    def change(config: dict[str, Any]) -> None:
        import numpy
        import torch

        os.environ["LEFT_BY_A_TRIAL"] = "1"
        os.chdir("/")
        sys.path.insert(0, "/left/by/a/trial")
        torch.set_default_dtype(torch.float64)
        numpy.random.seed(1)

    def look(config: dict[str, Any]) -> dict[str, Any]:
        import torch

        return {
            "environment": os.environ.get("LEFT_BY_A_TRIAL"),
            "path": "/left/by/a/trial" in sys.path,
            "dtype": str(torch.get_default_dtype()),
            "in_own_directory": Path.cwd().name.startswith("trial_"),
        }

    workers.run(change)
    _, events = workers.run(look)
    assert events[0].metrics == {
        "environment": None,
        "path": False,
        "dtype": "torch.float32",
        "in_own_directory": True,
    }


def test_what_ranks_print_arrives_under_their_rank(workers: Workers) -> None:
    def train(config: dict[str, Any]) -> None:
        print(f"hello from rank {rank_here()}")
        os.write(2, b"and past Python\n")

    workers.begin(train)
    workers.events()
    logs: list[LogChunk] = workers.group.take_logs()
    assert workers.group.end_trial()
    for rank in range(workers.size):
        text = b"".join(each.text for each in logs if each.rank == rank)
        assert f"hello from rank {rank}\n".encode() in text and b"and past Python\n" in text


def test_every_rank_starts_from_the_checkpoint_and_finds_the_newest(workers: Workers, tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "weights").write_text(name)

    def train(config: dict[str, Any]) -> None:
        import tempfile

        from horovod_tune import get_checkpoint, report

        def weights() -> str:
            checkpoint = get_checkpoint()
            assert checkpoint is not None
            return Path(checkpoint.path, "weights").read_text()

        before = weights()
        with tempfile.TemporaryDirectory() as directory:
            report(step=1, checkpoint=directory if rank_here() == 0 else None)
        Path(f"rank_{rank_here()}.json").write_text(json.dumps([before, weights()]))

    here = ray.get_runtime_context().get_node_id()
    directory = workers.begin(train, start=CheckpointPlace(str(tmp_path / "old"), node_id=here))
    event = workers.group.next_event()
    assert isinstance(event, Report) and event.checkpoint_path is not None
    new = CheckpointPlace(str(tmp_path / "new"), node_id=here)
    assert isinstance(workers.group.next_event(new), Finished)
    assert workers.group.end_trial()
    assert noted(directory) == {rank: ["old", "new"] for rank in range(workers.size)}


def test_a_failed_rank_is_named_with_its_traceback(own_workers: Callable[..., Workers]) -> None:
    def train(config: dict[str, Any]) -> None:
        from horovod_tune import report

        report(step=1)
        if rank_here() == config["bad"]:
            raise ValueError("the learning rate is bad")
        report(step=2)

    workers = own_workers()
    workers.begin(train, bad=workers.size - 1)
    with pytest.raises(TrainingFailed) as caught:
        workers.events()
    text = str(caught.value)
    assert text.startswith(f"rank {workers.size - 1} of {workers.size} on {os.uname().nodename} failed:")
    assert "ValueError: the learning rate is bad" in text and "in train" in text


@pytest.mark.slow
def test_a_rank_without_heartbeats_is_named(own_workers: Callable[..., Workers]) -> None:
    def train(config: dict[str, Any]) -> None:
        from horovod_tune import report

        report(step=1)
        while rank_here() == config["stopped"]:  # the kernel continues a process group that becomes orphaned
            os.kill(os.getpid(), signal.SIGSTOP)
        report(step=2)

    workers = own_workers(timeout_s=45.0)
    workers.begin(train, stopped=workers.size - 1)
    with pytest.raises(TrainingFailed) as caught:
        workers.events()
    assert f"rank {workers.size - 1} of {workers.size}" in str(caught.value)
    assert "stopped responding" in str(caught.value) and "for 45 s (timeout_s)" in str(caught.value)


def test_what_a_trial_leaves_running_ends_with_it(workers: Workers) -> None:
    def train(config: dict[str, Any]) -> None:
        import subprocess
        import threading

        threading.Thread(target=threading.Event().wait, name="left-behind", daemon=True).start()
        left = subprocess.Popen(["sleep", "600"], start_new_session=True)
        Path(f"left_{rank_here()}").write_text(str(left.pid))

    directory, _ = workers.run(train)
    left = [int(path.read_text()) for path in directory.glob("left_*")]
    assert len(left) == workers.size and not any(map(psutil.pid_exists, left))


def test_a_killed_rank_is_named_and_closing_leaves_no_process(workers: Workers) -> None:
    """Last in this module, since it kills the workers."""

    def train(config: dict[str, Any]) -> None:
        from horovod_tune import report

        note_rank(config)
        report(step=1)
        if rank_here() == config["killed"]:
            print("its last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        report(step=2)

    directory = workers.begin(train, killed=workers.size - 1)
    with pytest.raises(TrainingFailed) as caught:
        workers.events()
    assert f"rank {workers.size - 1} of {workers.size}" in str(caught.value)
    assert " died:" in str(caught.value) and "its last words" in str(caught.value)
    assert any(b"its last words" in chunk.text for chunk in workers.group.take_logs())
    assert not workers.group.end_trial()
    workers.close()
    workers.group.close()
    facts = noted(directory)
    assert len(facts) == workers.size
    assert [each["pid"] for each in facts.values() if psutil.pid_exists(each["pid"])] == []
    see_them_gone([*template_processes(), *rank_processes()])
