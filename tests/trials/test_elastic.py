"""Elastic trials: what is left of a world continues when a rank is lost, and grows again."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from horovod_tune import DistributedTrainableCreator, commit, get_state, get_world, report

pytestmark = [pytest.mark.slow, pytest.mark.processes]

pytest.importorskip("horovod")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

EPOCHS = 12


def die_once(folder: str) -> None:
    """Kill this process, the first time that any rank comes here."""
    try:
        (Path(folder) / "died").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def hang_once(folder: str) -> None:
    """Never return, the first time that any rank comes here."""
    hung = Path(folder, "hung")
    if not hung.exists():
        hung.touch()
        time.sleep(10_000)


def is_over(epoch: int, size: int, until: int) -> bool:
    """Return True if a trial has trained long enough: some epochs, the last one on ``until`` ranks."""
    if epoch > EPOCHS:
        time.sleep(0.02)  # others are starting
    return epoch >= EPOCHS and (size >= until or epoch > 5000)


def train(config: dict[str, Any]) -> None:
    """Sum the epochs' numbers; every rank has the same sum, whatever happens to the others."""
    import torch

    if config["backend"] == "horovod":
        import horovod.torch as hvd

        hvd.init()
        place: Any = (hvd.rank, hvd.size)
    else:
        import torch.distributed as dist

        place = (dist.get_rank, dist.get_world_size)
    state = get_state() or {"epoch": 0, "sum": 0.0}
    size = 0
    while not is_over(state["epoch"], size, config.get("until", 1)):
        epoch = state["epoch"] + 1
        rank, size = (number() for number in place)
        if epoch == 4 and rank == config.get("dies", -1):
            die_once(config["folder"])
        if epoch == 4 and rank == config.get("hangs", -1):
            hang_once(config["folder"])
        total = torch.tensor([float(epoch)], dtype=torch.float64)
        if config["backend"] == "horovod":
            total = hvd.allreduce(total, op=hvd.Sum)
        else:
            dist.all_reduce(total)
        state = {"epoch": epoch, "sum": state["sum"] + total.item() / size}
        world = get_world()
        assert (world.rank, world.size) == (rank, size)
        report(**state, size=size, pid=os.getpid(), changes=world.changes)
        commit(state)


Run = Callable[..., Any]


@pytest.fixture
def run(tune_run: Run, tmp_path: Path) -> Run:
    """Run one trial to its end, and return its results as records."""

    def run_one(*, config: Any, backend: str = "horovod", **options: Any) -> Any:
        trainable = DistributedTrainableCreator(train, **{"min_workers": 2, "backend": backend, **options})
        config = {"folder": str(tmp_path), "backend": backend, "until": 3, **config}
        analysis = tune_run(trainable, config=config, raise_on_failed_trial=False)
        (trial,) = analysis.trials
        assert trial.status == "TERMINATED" and trial.num_failures == 0
        records = next(iter(analysis.trial_dataframes.values())).to_dict("records")
        check_sums(records)
        return records

    return run_one


def check_sums(records: list[dict[str, Any]]) -> None:
    """Every epoch is there, its sum is an undisturbed run's; ranks know how often their world changed."""
    assert all(each["changes"] == each["world_changes"] for each in records)
    assert sorted({each["epoch"] for each in records}) == list(range(1, records[-1]["epoch"] + 1))
    assert all(each["sum"] == sum(range(each["epoch"] + 1)) for each in records)


@pytest.mark.contract
def test_a_lost_rank_comes_back(run: Run) -> None:
    records = run(num_slots=3, config={"dies": 1})
    sizes = [each["size"] for each in records]
    assert sizes[0] == 3 and 2 in sizes and sizes[-1] == 3
    before, after = records[sizes.index(2) - 1], records[sizes.index(2)]
    assert after["world_size"] == 2
    assert "rank 1 on" in after["world_change"] and "died" in after["world_change"]
    assert (before["world_changes"], after["world_changes"]) == (0, 1)
    assert before["world_change_s"] == 0 < after["world_change_s"]
    assert records[0]["pid"] == records[-1]["pid"], "rank 0 keeps its process"


@pytest.mark.parametrize(("backend", "timeout_s"), [("horovod", 10), ("torch", 30)])
def test_the_others_continue_when_a_rank_hangs_and_another_joins(
    run: Run, backend: str, timeout_s: float
) -> None:
    options = {"num_slots": 3, "timeout_s": timeout_s, "stall_timeout_s": 6}
    records = run(backend=backend, config={"hangs": 1}, **options)
    sizes = [each["size"] for each in records]
    assert sizes[0] == 3 and 2 in sizes and sizes[-1] == 3
    change = next(each["world_change"] for each in records if each["epoch"] == 4)
    assert "rank 1 on" in change and "hung" in change
    assert records[0]["pid"] == records[-1]["pid"], "rank 0 keeps its process"


def test_a_trial_starts_with_min_workers_and_grows(run: Run) -> None:
    records = run(min_workers=1, max_workers=3, config={})
    assert records[0]["size"] == 1 and records[-1]["size"] == 3
