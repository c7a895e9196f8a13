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


def die_once(folder: str, name: str) -> None:
    """Kill this process, the first time that any rank comes here under ``name``."""
    try:
        (Path(folder) / f"died_{name}").touch(exist_ok=False)
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
    import horovod.torch as hvd
    import torch

    hvd.init()
    state = get_state() or {"epoch": 0, "sum": 0.0}
    size = 0
    while not is_over(state["epoch"], size, config.get("until", 1)):
        epoch, size = state["epoch"] + 1, hvd.size()
        if epoch == 4 and hvd.rank() == config.get("dies", -1):
            die_once(config["folder"], "in_step")
        if epoch == 4 and hvd.rank() == config.get("hangs", -1):
            hang_once(config["folder"])
        mean = hvd.allreduce(torch.tensor([float(epoch)], dtype=torch.float64)).item()
        state = {"epoch": epoch, "sum": state["sum"] + mean}
        world = get_world()
        assert (world.rank, world.size) == (hvd.rank(), hvd.size())
        report(**state, size=hvd.size(), pid=os.getpid(), changes=world.changes)
        commit(state)


def train_with_horovods_api(config: dict[str, Any]) -> None:
    """The same as Horovod's own elastic mode has it."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    resets: list[int] = []

    @hvd.elastic.run
    def loop(state: Any) -> None:
        size = 0
        while not is_over(state.epoch, size, config.get("until", 1)):
            size = hvd.size()
            if state.epoch == 4 and hvd.rank() == config.get("dies", -1):
                die_once(config["folder"], "in_step")
            step = hvd.allreduce(torch.tensor([float(state.epoch + 1)]))
            with torch.no_grad():
                state.model.weight += step
            state.epoch += 1
            report(epoch=state.epoch, sum=state.model.weight.item(), size=hvd.size(), resets=len(resets))
            state.commit()

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0)
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    loop(state)


def train_with_torch(config: dict[str, Any]) -> None:
    """The same on torch.distributed."""
    import torch
    import torch.distributed as dist

    state = get_state() or {"epoch": 0, "sum": 0.0}
    size = 0
    while not is_over(state["epoch"], size, config.get("until", 1)):
        epoch, size = state["epoch"] + 1, dist.get_world_size()
        if epoch == 4 and dist.get_rank() == config.get("hangs", -1):
            hang_once(config["folder"])
        total = torch.tensor([float(epoch)], dtype=torch.float64)
        dist.all_reduce(total)
        state = {"epoch": epoch, "sum": state["sum"] + total.item() / size}
        world = get_world()
        assert (world.rank, world.size) == (dist.get_rank(), size)
        report(**state, size=size, pid=os.getpid(), changes=world.changes)
        commit(state)


def wait_for_the_end_of_the_world() -> None:
    """Return when Horovod's world has been ended by another rank's loss; nothing collective is called."""
    import horovod.torch as hvd

    end = time.monotonic() + 120
    while hvd.is_initialized():
        assert time.monotonic() < end, "the world of a lost rank does not end"
        time.sleep(0.01)


def ask_after_a_loss_with_horovods_api(config: dict[str, Any]) -> None:
    import horovod.torch as hvd
    from horovod.common import elastic
    from horovod.runner.elastic.worker import WorkerNotificationManager

    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        hvd.rank()
    hvd.init()
    sampler = hvd.elastic.ElasticSampler(range(EPOCHS))  # which asks for its rank when it is restored

    @hvd.elastic.run
    def loop(state: Any) -> None:
        # Horovod's own would listen on a port.
        assert not isinstance(elastic.notification_manager, WorkerNotificationManager)
        while state.epoch < EPOCHS:
            if hvd.size() == 3 and state.epoch == 3:
                if hvd.rank() == 2:
                    die_once(config["folder"], "in_step")
                wait_for_the_end_of_the_world()
                assert hvd.global_process_set.rank() == hvd.rank()
            state.epoch += 1
            report(epoch=state.epoch, sum=sum(range(state.epoch + 1)), size=hvd.size())
            state.commit()

    loop(hvd.elastic.TorchState(sampler=sampler, epoch=0))


Run = Callable[..., Any]


@pytest.fixture
def run(tune_run: Run, tmp_path: Path) -> Run:
    """Run one trial and return its results as records, with its trial."""

    def run_one(function: Any, *, slots: int | None = 3, config: Any = None, **options: Any) -> Any:
        if slots is not None:
            options["num_slots"] = slots
        trainable = DistributedTrainableCreator(function, **{"min_workers": 2, **options})
        analysis = tune_run(
            trainable, config={"folder": str(tmp_path), **(config or {})}, raise_on_failed_trial=False
        )
        (trial,) = analysis.trials
        frames = list(analysis.trial_dataframes.values())
        return trial, frames[0].to_dict("records") if frames else []

    return run_one


def check_sums(records: list[dict[str, Any]]) -> None:
    """Every epoch is there, its sum is an undisturbed run's; ranks know how often their world changed."""
    assert all(each.get("changes", each["world_changes"]) == each["world_changes"] for each in records)
    assert sorted({each["epoch"] for each in records}) == list(range(1, records[-1]["epoch"] + 1))
    assert all(each["sum"] == sum(range(each["epoch"] + 1)) for each in records)


def test_a_rank_that_is_asked_for_when_the_world_has_ended_is_no_error(run: Run) -> None:
    trial, records = run(ask_after_a_loss_with_horovods_api)
    assert trial.status == "TERMINATED" and trial.num_failures == 0
    check_sums(records)
    assert "died" in records[3]["world_change"] and records[-1]["epoch"] == EPOCHS


@pytest.mark.parametrize(
    "function", [pytest.param(train, marks=pytest.mark.contract), train_with_horovods_api]
)
def test_a_lost_rank_comes_back(run: Run, function: Any) -> None:
    trial, records = run(function, config={"dies": 1, "until": 3})
    assert trial.status == "TERMINATED" and trial.num_failures == 0
    check_sums(records)
    sizes = [each["size"] for each in records]
    assert sizes[0] == 3 and 2 in sizes and sizes[-1] == 3
    before, after = records[sizes.index(2) - 1], records[sizes.index(2)]
    assert after["world_size"] == 2
    assert "rank 1 on" in after["world_change"] and "died" in after["world_change"]
    assert (before["world_changes"], after["world_changes"]) == (0, 1)
    assert before["world_change_s"] == 0 < after["world_change_s"]
    if function is train_with_horovods_api:
        assert records[-1]["resets"] >= 1
    else:
        assert records[0]["pid"] == records[-1]["pid"], "rank 0 keeps its process"


@pytest.mark.parametrize(
    ("function", "options"),
    [(train, {"timeout_s": 10}), (train_with_torch, {"timeout_s": 30, "backend": "torch"})],
    ids=["horovod", "torch"],
)
def test_the_others_go_on_when_a_rank_hangs_and_another_comes(run: Run, function: Any, options: Any) -> None:
    trial, records = run(function, stall_timeout_s=6, config={"hangs": 1, "until": 3}, **options)
    assert trial.status == "TERMINATED" and trial.num_failures == 0
    check_sums(records)
    sizes = [each["size"] for each in records]
    assert sizes[0] == 3 and 2 in sizes and sizes[-1] == 3
    change = next(each["world_change"] for each in records if each["epoch"] == 4)
    assert "rank 1 on" in change and "hung" in change
    assert records[0]["pid"] == records[-1]["pid"], "rank 0 keeps its process"


def test_a_trial_starts_with_min_workers_and_grows(run: Run) -> None:
    trial, records = run(train, slots=None, min_workers=1, max_workers=3, config={"until": 3})
    assert trial.status == "TERMINATED"
    check_sums(records)
    assert records[0]["size"] == 1 and records[-1]["size"] == 3
