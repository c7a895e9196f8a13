"""What plain processes show of the ranks of a host: how they end, and what reaches them."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import ray
from worker_kinds import Workers

from horovod_tune.errors import TrainingFailed

pytestmark = [pytest.mark.slow, pytest.mark.processes]

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray has a copy of its own


@pytest.fixture
def workers(ray_session: Any, tmp_path: Path) -> Iterator[Workers]:
    made = Workers("plain", tmp_path)
    yield made
    made.close()


@dataclass
class Layer:
    """As a script defines it: in no module that another process could import."""

    width: int


def test_a_config_may_hold_objects_of_the_scripts_own_classes(workers: Workers) -> None:
    def train(config: dict[str, Any]) -> dict[str, Any]:
        return {"width": config["layer"].width, "made": config["kind"](3).width}

    _, events = workers.run(train, layer=Layer(8), kind=Layer)
    assert events[0].metrics == {"width": 8, "made": 3}


def test_what_two_ranks_print_at_once_arrives_whole(workers: Workers) -> None:
    lines = 20_000

    def train(config: dict[str, Any]) -> None:
        rank = os.environ["RANK"]
        for number in range(config["lines"]):
            print(f"{rank} {number}")

    workers.begin(train, lines=lines)
    workers.events()
    logs = workers.group.take_logs()
    for rank in (0, 1):
        text = b"".join(each.text for each in logs if each.rank == rank).decode()
        own = [
            line for line in text.splitlines() if line.startswith(f"{rank} ")
        ]  # torch may warn of something
        assert own == [f"{rank} {number}" for number in range(lines)]
    assert workers.group.end_trial() == []


def test_a_rank_that_leaves_by_the_back_door_is_named_though_its_status_is_0(workers: Workers) -> None:
    def train(config: dict[str, Any]) -> None:
        import horovod_tune

        horovod_tune.report(step=1)
        if os.environ["RANK"] == "1":
            os._exit(0)
        horovod_tune.report(step=2)

    workers.begin(train)
    with pytest.raises(TrainingFailed, match=r"(?s)rank 1 of 2 on .* died.*exited with status 0"):
        workers.events()


@pytest.mark.parametrize("was_reset", [True, False])
def test_a_rank_that_dies_between_two_trials_is_named_at_once(workers: Workers, was_reset: bool) -> None:
    def train(config: dict[str, Any]) -> None:
        Path(f"pid_{os.environ['RANK']}").write_text(str(os.getpid()))

    directory = workers.begin(train)
    workers.events()
    pid = int((directory / "pid_1").read_text())
    if was_reset:
        assert workers.group.end_trial() == []
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=30)
    if was_reset:
        workers.begin(train)
        with pytest.raises(TrainingFailed, match=r"(?s)rank 1 of 2 on .* died.*ended by SIGKILL"):
            workers.events()
    else:
        (problem,) = [each for each in workers.group.end_trial() if each.startswith("rank 1: process")]
        assert "SIGKILL" in problem
