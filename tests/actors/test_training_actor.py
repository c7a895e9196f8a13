"""A training actor, its template and its rank's real process, as the coordinator sees them; without Ray."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import cloudpickle
import psutil
import pytest
import ray
from backend_of_one import BackendOfOne
from processes import eventually

from horovod_tune import commit, get_checkpoint, get_state, get_world, report
from horovod_tune.actors import rank_output, rank_process
from horovod_tune.actors.training_actor import TrainingActor
from horovod_tune.messages import (
    Assignment,
    AwaitedRanks,
    CheckpointPlace,
    FailureKind,
    Finished,
    LogChunk,
    NeedsWorld,
    RankInfo,
    Report,
    TrialRequest,
)
from horovod_tune.ray_compat import queries

pytestmark = [pytest.mark.processes]

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ALONE = RankInfo(0, 1, 0, 1, 0, 1)
SECOND = RankInfo(1, 2, 1, 2, 0, 1)


class Coordinator:
    """What a coordinator does with one training actor."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.actor = TrainingActor(BackendOfOne, (), 60.0)
        self.log = b""
        self.messages: deque[Any] = deque()
        self.run = 0

    def begin(
        self, train: Callable[..., Any], *, rank_info: RankInfo = ALONE, variable: str = "1", **settings: Any
    ) -> None:
        self.run += 1
        self.log = b""
        self.messages.clear()
        own = str(self.folder / f"trial_{self.run}")
        names = str(self.run), "a trial", own, own, "experiment"
        request = TrialRequest(*names, cloudpickle.dumps({}), cloudpickle.dumps(train), run=self.run)
        self.actor.begin(Assignment((rank_info,), {"OF_THE_WORLD": variable}), replace(request, **settings))

    def next(self) -> Any:
        """Return the next message that is no output."""
        while not self.messages:
            self._poll()
        return self.messages.popleft()

    def _poll(self) -> list[str]:
        received = self.actor.poll(0.1)
        chunks = [each for each in received if isinstance(each, LogChunk)]
        self.log += b"".join(each.text for each in chunks)
        self.messages += [each for each in received if not isinstance(each, LogChunk)]
        return [each.stack for each in chunks]

    def end(self) -> list[str]:
        """End the trial; return the lines that the rank has printed."""
        chunks, warning = self.actor.end_trial(60.0)
        assert not warning
        return (self.log + b"".join(each.text for each in chunks)).decode().splitlines()

    def stack_where(self, text: str) -> str:
        """Return the stack of the training function once ``text`` is in it."""

        def look() -> str:
            self.actor.reply_now()
            return next((stack for stack in self._poll() if text in stack), "")

        return str(eventually(look))


@pytest.fixture
def coordinator(of_all: Coordinator) -> Iterator[Coordinator]:
    yield of_all
    of_all.actor.end_trial(0.0)  # of a test that failed


@pytest.fixture(scope="module")
def of_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Coordinator]:
    """A coordinator whose actor the tests share: each trial has a process of its own."""
    folder = tmp_path_factory.mktemp("actor")
    context = Mock(gcs_address="", namespace="", runtime_env={})
    context.get_accelerator_ids.return_value = {}
    context.get_job_id.return_value, context.get_node_id.return_value = "1", "this node"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        patch.setattr(ray, "get_runtime_context", lambda: context)
        patch.setattr(ray, "get_gpu_ids", list)
        patch.setattr(ray, "get", lambda value: value)
        patch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
        patch.setattr(queries, "private_directory", lambda: folder)
        patch.setattr(rank_output, "_print", lambda data, label: None)
        made = Coordinator(folder)
        made.actor.describe()
        yield made
        pids = [each.pid for each in (made.actor._spare, made.actor._rank) if each is not None]
        made.actor._prepare().is_lost = True
        made.actor._template.close()
        eventually(lambda: not any(map(psutil.pid_exists, pids)), why="a rank outlives its actor")


def test_reports_wait_for_their_own_acknowledgement(coordinator: Coordinator) -> None:
    def train(config: dict[str, Any]) -> dict[str, Any]:
        report(loss=0.5, environment=os.environ["OF_THE_WORLD"], parent=os.getppid() > 1)
        return {"loss": 0.25}

    coordinator.begin(train)
    first = coordinator.next()
    assert first == Report(1, {"loss": 0.5, "environment": "1", "parent": True})
    coordinator.actor.acknowledge(coordinator.run - 1, 1, None)  # of another trial
    assert "in train" in coordinator.stack_where("in report")
    coordinator.actor.acknowledge(coordinator.run, 1, None)
    assert coordinator.next() == Report(2, {"loss": 0.25})
    coordinator.actor.acknowledge(coordinator.run, 2, None)
    assert coordinator.next() == Finished(0)
    assert coordinator.end() == [f"enter 0 {coordinator.run}.0", "end True"]


def test_metrics_that_only_pickle_handles_arrive(coordinator: Coordinator) -> None:
    def train(config: dict[str, Any]) -> None:
        report(day=datetime.date(2026, 11, 28))

    coordinator.begin(train)
    message = coordinator.next()
    assert cloudpickle.loads(message.metrics) == {"day": datetime.date(2026, 11, 28)} and message.index == 1
    coordinator.actor.acknowledge(coordinator.run, 1, None)
    assert coordinator.next() == Finished(0)
    coordinator.end()


def test_a_stopped_function_has_not_returned(coordinator: Coordinator) -> None:
    def train(config: dict[str, Any]) -> None:
        report(loss=0.5)

    coordinator.begin(train)
    coordinator.next()
    coordinator.actor.stop_training()
    assert coordinator.next() == Finished(0, has_returned=False)
    assert coordinator.end()[1:] == ["end False"]


def test_an_error_has_the_functions_traceback_and_ends_the_world(coordinator: Coordinator) -> None:
    def train(config: dict[str, Any]) -> None:
        print("before")
        raise ValueError("diverged")

    coordinator.begin(train, rank_info=SECOND)
    failed = coordinator.next()
    assert (failed.rank, failed.kind) == (1, FailureKind.RAISED)
    assert failed.traceback.splitlines()[1].endswith("in train")
    assert failed.traceback.endswith("ValueError: diverged\n")
    assert coordinator.end()[1:] == ["before", "end False"]


def test_a_stall_is_described_with_what_the_inspector_printed(coordinator: Coordinator) -> None:
    def train(config: dict[str, Any]) -> None:
        from backend_of_one import Stalled

        print("E horovod/common/stall_inspector.cc:105] stalled. \nMissing ranks:\n1: [loss]", flush=True)
        raise Stalled

    coordinator.begin(train)
    found = [coordinator.next()]
    while found[-1] == AwaitedRanks({1: "loss"}):
        found.append(coordinator.next())
    assert len(found) > 1 and found[-1].kind is FailureKind.STALLED
    assert "The report: E horovod/common/stall_inspector.cc:105] stalled. \nMissing" in found[-1].traceback
    coordinator.end()


def test_ranks_that_the_inspector_misses_are_reported_once_the_rank_confirms_them(
    coordinator: Coordinator,
) -> None:
    def train(config: dict[str, Any]) -> None:
        print("E horovod/common/stall_inspector.cc:105] stalled. \nMissing ranks:\n1: [loss]", flush=True)
        report(loss=0.5)

    coordinator.begin(train, rank_info=SECOND)
    assert coordinator.next() == AwaitedRanks({1: "loss"})
    coordinator.actor.acknowledge(coordinator.run, 1, None)
    assert coordinator.next() == Finished(1)
    coordinator.end()


def test_a_report_of_a_rank_other_than_0_ends_it(coordinator: Coordinator) -> None:
    def train(config: dict[str, Any]) -> None:
        from horovod_tune.session import session

        live = session.current()
        assert live is not None
        live._send(Report(1, {"loss": 0.5}))
        report(loss=0.5)

    coordinator.begin(train, rank_info=SECOND)
    failed = coordinator.next()
    assert (failed.rank, failed.kind) == (1, FailureKind.DIED)
    assert "it sent a report, which only rank 0 may do" in failed.traceback


def test_an_elastic_rank_leaves_a_broken_world_and_joins_the_next(coordinator: Coordinator) -> None:
    def train(config: dict[str, Any]) -> None:
        epoch = get_state() or 0
        commit(epoch + 1)
        world = get_world()
        report(epoch=epoch, rank=world.rank, size=world.size, variable=os.environ["OF_THE_WORLD"])

    actor = coordinator.actor
    coordinator.begin(train, is_elastic=True)
    assert coordinator.next().metrics == {"epoch": 0, "rank": 0, "size": 1, "variable": "1"}
    assert actor.can_restore()
    dumped = actor.dump_commit()
    assert dumped is not None
    actor.break_world(7)  # of another world
    assert "in train" in coordinator.stack_where("in report")
    actor.break_world(0)
    left = coordinator.next()
    assert isinstance(left, NeedsWorld) and left.error.startswith("WorldBroken: ") and not left.stalled
    second = Assignment((replace(SECOND, rank=0),), {"OF_THE_WORLD": "2", "CUDA_VISIBLE_DEVICES": "9"})
    actor.rejoin(second, 1, 1, b"")
    assert coordinator.next() == Report(2, {"epoch": 1, "rank": 0, "size": 2, "variable": "2"})
    actor.acknowledge(coordinator.run, 2, None)
    assert coordinator.next() == Finished(0)
    assert {"abort", "leave", f"enter 0 {coordinator.run}.1"} <= set(coordinator.end())


def test_an_elastic_rank_leaves_at_the_commit_after_an_offer(coordinator: Coordinator) -> None:
    def train(config: dict[str, Any]) -> None:
        if not get_state():
            report(epoch=1)
        commit(1)

    actor = coordinator.actor
    coordinator.begin(train, is_elastic=True)
    coordinator.next()
    actor.offer_change(7)  # of another world
    actor.offer_change(0)
    actor.acknowledge(coordinator.run, 1, None)
    assert coordinator.next() == NeedsWorld(0)
    actor.rejoin(Assignment((ALONE,)), 1, 1, b"")
    assert coordinator.next() == Finished(0), "the offer was for one world"
    assert coordinator.end().count("offer_change") == 1


def test_a_checkpoint_of_another_node_is_fetched_by_the_actor(
    coordinator: Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    def ask_node(place: CheckpointPlace, target: str | None = None) -> tuple[int, int] | None:
        asked.append((place.path, place.node_id))
        if target is None:
            return (1, 2)
        Path(target).mkdir(parents=True)
        Path(target, "weights").write_text("trained")
        return None

    def train(config: dict[str, Any]) -> str | None:
        checkpoint = get_checkpoint()
        assert checkpoint is not None
        with checkpoint.as_directory() as directory:
            print(Path(directory, "weights").read_text())

    monkeypatch.setattr(rank_process, "ask_node", ask_node)
    coordinator.begin(train, checkpoint=CheckpointPlace("/elsewhere/c", node_id="another node"))
    assert coordinator.next() == Finished(0)
    assert "trained" in coordinator.end()
    assert asked == [("/elsewhere/c", "another node")] * 2, "its fingerprint, then its files"


def test_parameters_are_written_once_and_read_by_each_rank(coordinator: Coordinator) -> None:
    def train(config: dict[str, Any]) -> None:
        from horovod_tune.session import session

        live = session.current()
        assert live is not None
        print(Path(live.request.parameters).read_text())

    for _ in range(2):
        coordinator.begin(train, parameters=b"weights")
        assert coordinator.next() == Finished(0)
        assert "weights" in coordinator.end()


def test_the_process_of_the_next_trial_is_there_before_it_begins(coordinator: Coordinator) -> None:
    def train(config: dict[str, Any]) -> None:
        print(os.getpid())

    coordinator.begin(train)
    assert coordinator.next() == Finished(0)
    coordinator.end()
    template = psutil.Process(coordinator.actor._template.pid)
    (spare,) = eventually(template.children)
    coordinator.begin(train)
    assert coordinator.next() == Finished(0)
    assert str(spare.pid) in coordinator.end()


def test_a_spare_process_that_has_ended_is_replaced(coordinator: Coordinator) -> None:
    coordinator.actor.describe()
    spare = coordinator.actor._spare
    assert spare is not None
    os.kill(spare.pid, signal.SIGKILL)
    assert spare.has_ended.wait(30)
    coordinator.begin(lambda config: None)
    assert coordinator.next() == Finished(0)
    coordinator.end()


def test_the_store_of_the_next_world_is_that_of_the_process_that_begins(coordinator: Coordinator) -> None:
    assert coordinator.actor.ask_backend(None, BackendOfOne.serve_store, "a host") == 6
    with pytest.raises(RuntimeError, match="KeyError: 'abort'"):  # not one of its answers
        coordinator.actor.ask_backend(None, BackendOfOne.abort)
    process = coordinator.actor._rank
    coordinator.begin(lambda config: print(os.getpid()))
    assert coordinator.next() == Finished(0)
    assert process is not None and str(process.pid) in coordinator.end()


def test_a_killed_rank_is_reported_with_its_last_output_and_another_template_follows(
    coordinator: Coordinator,
) -> None:
    def train(config: dict[str, Any]) -> None:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    coordinator.begin(train)
    failed = coordinator.next()
    assert (failed.rank, failed.kind) == (0, FailureKind.DIED)
    assert "it was ended by SIGKILL" in failed.traceback and "\n  last words" in failed.traceback
    assert b"last words" in coordinator.log
    assert coordinator.actor.end_trial(1.0) == ([], "")
    template = coordinator.actor._template.pid
    os.kill(template, signal.SIGKILL)
    supervisor = coordinator.actor._supervisor
    assert supervisor is not None
    eventually(lambda: supervisor.is_lost and not supervisor._ranks)
    coordinator.begin(lambda config: None)
    assert coordinator.next() == Finished(0)
    coordinator.end()
    assert coordinator.actor._template.pid != template


def test_a_process_that_does_not_end_is_killed_with_a_warning(coordinator: Coordinator) -> None:
    def train(config: dict[str, Any]) -> None:
        threading.Thread(target=threading.Event().wait).start()

    coordinator.begin(train)
    assert coordinator.next() == Finished(0)
    process = coordinator.actor._rank
    assert process is not None
    _, warning = coordinator.actor.end_trial(0.1)
    assert f"rank 0's process ({process.pid}) still ran 0.1 s after its training function" in warning
    assert process.status == -signal.SIGKILL


def test_before_the_actor_is_killed_its_rank_stops_and_its_world_is_closed(coordinator: Coordinator) -> None:
    def train(config: dict[str, Any]) -> None:
        try:
            report(loss=0.5)
        finally:
            sys.backend.was_closed.wait(30.0)  # type: ignore[attr-defined]

    coordinator.begin(train)
    coordinator.next()
    coordinator.actor.end_process(60.0)
    assert coordinator.next() == Finished(0, has_returned=False)
    assert "close" in coordinator.end()
