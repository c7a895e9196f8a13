"""Trials whose world changes, by a loss or as their batch grows: passes and rate follow it by themselves."""

from __future__ import annotations

import math
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from ray.tune.schedulers import FIFOScheduler, ResourceChangingScheduler

from horovod_tune import DistributedTrainableCreator, commit, get_checkpoint, get_state, large_batch, report
from horovod_tune.search import DistributeByGlobalBatch

pytestmark = [pytest.mark.slow, pytest.mark.processes]

pytest.importorskip("horovod")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SAMPLES, EPOCHS = 60, 12
BASE = {"lr": 0.05, "epochs": EPOCHS, "base_batch_size": 8, "momentum": 0.9, "warmup_epochs": 2}
BASE |= {"max_micro_batch_size": 4, "scaling": "linear", "max_norm": 5.0}


def new_model() -> torch.nn.Module:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1)]
    return torch.nn.Sequential(*layers).double()


def epoch_of(model: torch.nn.Module, setup: large_batch.TrainingSetup, epoch: int) -> None:
    rows = torch.randn(SAMPLES, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
    for passes in setup.batches(order):
        for part in passes:
            loss = (model(rows[part]) - rows[part].sum(1, keepdim=True)).square().mean()
            setup.backward(loss, samples=len(part))
        setup.step()


def growth_of(setup: large_batch.TrainingSetup, config: dict[str, Any]) -> large_batch.BatchGrowth:
    policy = large_batch.FixedGrowth(config.get("milestones", [3]))
    return large_batch.BatchGrowth(policy, setup.batch, max_global_batch_size=config.get("largest", 64))


def tell(
    model: torch.nn.Module, setup: large_batch.TrainingSetup, epoch: int, checkpoint: str | None = None
) -> None:
    found = {"epoch": epoch, "weights": checksum(model), "world": setup.split.world_size}
    report(**found, passes=setup.split.passes, **setup.metrics(), checkpoint=checkpoint)


def checksum(model: torch.nn.Module) -> float:
    return float(sum((parameter.detach() ** 2).sum() for parameter in model.parameters()))


def die_once(folder: str) -> None:
    try:
        (Path(folder) / "died").touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def train(config: dict[str, Any]) -> None:
    """Called again in each new world: everything is made again, and continues from what was committed."""
    import horovod.torch as hvd

    hvd.init()
    model = new_model()
    setup = large_batch.from_config(model, config, num_samples=SAMPLES, elastic=True)
    growth = growth_of(setup, config)
    state = get_state() or {"epoch": 0, "waited": 0}
    if "model" in state:
        model.load_state_dict(state["model"])
        setup.load_state_dict(state["setup"])
        growth.load_state_dict(state["growth"])
    while state["epoch"] < EPOCHS:
        if state["epoch"] == 8 and hvd.size() < 3 and state["waited"] < 5000:
            time.sleep(0.02)  # the third rank starts
            commit({**state, "waited": state["waited"] + 1})
            state["waited"] += 1
            continue
        epoch = state["epoch"] + 1
        if epoch == 6 and hvd.rank() == 1:
            die_once(config["folder"])
        epoch_of(model, setup, epoch)
        growth.update()
        tell(model, setup, epoch)
        parts = {"model": model.state_dict(), "setup": setup.state_dict(), "growth": growth.state_dict()}
        state = {"epoch": epoch, "waited": 0, **parts}
        commit(state)


def train_with_horovods_api(config: dict[str, Any]) -> None:
    """The objects stay in those processes that stay, and follow the world when Horovod resets them."""
    import horovod.torch as hvd

    hvd.init()
    model = new_model()
    setup = large_batch.from_config(model, config, num_samples=SAMPLES, elastic=True)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        setup.load_state_dict({**setup.state_dict(), "scheduler": state.scheduler})
        while state.epoch < EPOCHS:
            if state.epoch == 8 and hvd.size() < 3:
                time.sleep(0.02)  # the third rank starts
                state.commit()
                continue
            if state.epoch == 5 and hvd.rank() == 1:
                die_once(config["folder"])
            epoch_of(model, setup, state.epoch + 1)
            state.epoch += 1
            state.scheduler = setup.scheduler.state_dict()
            tell(model, setup, state.epoch)
            state.commit()

    state = hvd.elastic.TorchState(
        model=model, optimizer=setup.optimizer, epoch=0, scheduler=setup.scheduler.state_dict()
    )
    state.register_reset_callbacks([setup.follow_world])
    loop(state)


def alone(config: dict[str, Any], *, grows: bool) -> dict[int, tuple[float, float]]:
    """Weights and rate after each epoch of one rank with the whole batch."""
    model = new_model()
    setup = large_batch.from_config(model, config, num_samples=SAMPLES)
    growth = growth_of(setup, config)
    found = {}
    for epoch in range(1, EPOCHS + 1):
        epoch_of(model, setup, epoch)
        if grows:
            growth.update()
        found[epoch] = checksum(model), setup.metrics()["lr"]
    return found


def run(tune_run: Any, function: Any, config: dict[str, Any]) -> list[dict[str, Any]]:
    trainable = DistributedTrainableCreator(function, min_workers=2, max_workers=3)
    analysis = tune_run(trainable, config=config)
    (trial,) = analysis.trials
    assert trial.status == "TERMINATED" and trial.num_failures == 0
    (frame,) = analysis.trial_dataframes.values()
    records = frame.to_dict("records")
    assert {each["world"] for each in records} == {2, 3}
    assert (Path(config["folder"]) / "died").exists()
    assert all(each["world"] == each["world_size"] for each in records)
    return records


@pytest.mark.parametrize("function", [train, train_with_horovods_api])
def test_the_same_global_batch_trains_to_the_same_weights_whatever_happens_to_the_world(
    tune_run: Any, tmp_path: Path, function: Any
) -> None:
    """20 samples a step, 40 after the growth: 3 ranks do not divide them, nor 2 as 3 do."""
    config = {**BASE, "global_batch_size": 20, "folder": str(tmp_path)}
    reference = alone(config, grows=function is train)
    records = run(tune_run, function, config)
    assert [records[each]["world"] for each in (0, -1)] == [2, 3]
    for each in records:
        weights, rate = reference[each["epoch"]]
        assert each["weights"] == pytest.approx(weights, rel=1e-11)
        assert each["lr"] == rate
        batch = 40 if function is train and each["epoch"] >= 3 else 20
        assert each["global_batch_size"] == batch
        assert each["passes"] == math.ceil(math.ceil(batch / each["world"]) / 4)


def test_the_same_local_batch_takes_the_rate_with_the_world(tune_run: Any, tmp_path: Path) -> None:
    config = {**BASE, "local_batch_size": 8, "schedule": "constant", "warmup_epochs": 0}
    for each in run(tune_run, train_with_horovods_api, {**config, "folder": str(tmp_path)}):
        assert each["passes"] == 2
        assert each["global_batch_size"] == 8 * each["world"]
        assert each["lr"] == pytest.approx(0.05 * each["world"])


def train_with_checkpoints(config: dict[str, Any]) -> None:
    """Started again in each new size: everything is made again, and continues from the checkpoint."""
    import horovod.torch as hvd

    hvd.init()
    model = new_model()
    setup = large_batch.from_config(model, config, num_samples=SAMPLES, elastic=True)
    growth = growth_of(setup, config)
    done, start = 0, get_checkpoint()
    if start is not None:
        done, *states = torch.load(Path(start.path, "state.pt"))
        for each, state in zip((model, setup, growth), states, strict=True):
            each.load_state_dict(state)
    for epoch in range(done + 1, EPOCHS + 1):
        epoch_of(model, setup, epoch)
        growth.update()
        with tempfile.TemporaryDirectory() as folder:
            states = [each.state_dict() for each in (model, setup, growth)]
            if hvd.rank() == 0:
                torch.save([epoch, *states], Path(folder, "state.pt"))
            tell(model, setup, epoch, checkpoint=folder)


def test_a_batch_that_grows_gets_workers_and_trains_to_the_weights_of_one_rank(tune_run: Any) -> None:
    """At most 4 samples a pass; 5, 10 and 20 a step, for which there are 4 slots."""
    config = {**BASE, "global_batch_size": 5, "milestones": [2, 5, 8], "largest": 20}
    analysis = tune_run(
        DistributedTrainableCreator(train_with_checkpoints, num_slots=1, timeout_s=200),
        config=config,
        scheduler=ResourceChangingScheduler(FIFOScheduler(), DistributeByGlobalBatch()),
    )
    (trial,) = analysis.trials
    assert trial.status == "TERMINATED" and trial.num_failures == 0
    (frame,) = analysis.trial_dataframes.values()
    seen = [tuple(each) for each in frame[["global_batch_size", "world", "passes"]].to_numpy().tolist()]
    # A report tells the batch of the next epoch, after which the trial has the workers for it.
    assert seen[:6] == [(5, 1, 2), (10, 2, 2), (10, 3, 1), (10, 3, 1), (20, 3, 2), (20, 4, 2)]
    assert seen[6:] == [(20, 4, 2)] * 6
    reference = alone(config, grows=True)
    for each in frame.to_dict("records"):
        assert each["world"] == each["world_size"]
        weights, rate = reference[each["epoch"]]
        assert each["weights"] == pytest.approx(weights, rel=1e-11) and each["lr"] == rate
