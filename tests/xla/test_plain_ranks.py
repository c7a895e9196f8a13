"""What plain processes show of the ranks of a host: how they end, and what reaches them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import pytest
import ray
from worker_kinds import Workers

from horovod_tune.errors import TrainingFailed

pytestmark = [pytest.mark.slow, pytest.mark.processes]

cloudpickle.register_pickle_by_value(sys.modules[__name__])
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray has a copy of its own


@pytest.fixture(scope="module")
def workers(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    made = Workers("plain", tmp_path_factory.mktemp("plain"))
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
    """The last one: it ends these workers."""

    def train(config: dict[str, Any]) -> None:
        import horovod_tune

        horovod_tune.report(step=1)
        if os.environ["RANK"] == "1":
            os._exit(0)
        horovod_tune.report(step=2)

    workers.begin(train)
    with pytest.raises(TrainingFailed, match=r"(?s)rank 1 of 2 on .* died.*exited with status 0"):
        workers.events()
