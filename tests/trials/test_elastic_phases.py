"""A rank of an elastic trial is lost in each phase of its life; one search runs all of these trials."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest

from horovod_tune import DistributedTrainableCreator, commit, get_state, report

pytest.importorskip("horovod")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

EPOCHS = 8
SAMPLES = 36


def die(config: dict[str, Any], name: str = "died", *, by: int = signal.SIGKILL) -> None:
    path = Path(config["folder"]) / f"{config['phase']}_{name}"
    try:
        with path.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return
    os.kill(os.getpid(), by)


def die_soon(config: dict[str, Any]) -> None:
    """Kill this process from another thread, a moment after what comes next has begun."""
    timer = threading.Timer(0.01, die, [config])
    timer.daemon = True
    timer.start()


class DiesWhenCopied:
    """A part of a state, during whose commit the process dies."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def __deepcopy__(self, memo: Any) -> None:
        die(self.config)


def train(config: dict[str, Any]) -> None:
    """Sum the epochs' numbers, and lose a rank on the way."""
    if config["phase"] == "sampler":
        train_with_a_sampler(config)
        return
    import horovod.torch as hvd
    import torch

    phase = config["phase"]
    # The world that `hvd.init()` is about to form.
    rank = int(os.environ["HOROVOD_RANK"])
    died = Path(config["folder"]) / f"{phase}_died"
    if phase == "start" and rank == 1:
        die(config)
    if phase == "init" and rank == 1 and not died.exists():
        die_soon(config)
    if phase == "re-forming" and rank == 1 and died.exists():
        die(config, "died_again")
    hvd.init()
    state = get_state() or {"epoch": 0, "sum": 0.0}
    while state["epoch"] < EPOCHS:
        epoch = state["epoch"] + 1
        is_it = epoch == 4 and not died.exists()
        if is_it and hvd.rank() == 1 and phase in ("step", "re-forming"):
            die(config)
        if is_it and hvd.rank() == 2 and phase == "stopped":
            die(config, by=signal.SIGSTOP)
        work = hvd.allreduce_async(torch.tensor([float(epoch)], dtype=torch.float64))
        if is_it and hvd.rank() == 1 and phase == "allreduce":
            die(config)
        state = {"epoch": epoch, "sum": state["sum"] + hvd.synchronize(work).item()}
        with tempfile.TemporaryDirectory() as folder:
            if phase == "checkpoint" and hvd.rank() == 0:
                Path(folder, "state").write_bytes(os.urandom(1 << 24))
            if is_it and hvd.rank() == 0 and phase in ("report", "checkpoint"):
                die_soon(config)
            report(**state, checkpoint=folder if phase == "checkpoint" else None)
        if is_it and hvd.rank() == 1 and phase == "commit":
            commit({**state, "bomb": DiesWhenCopied(config)})
        commit(state)


def train_with_a_sampler(config: dict[str, Any]) -> None:
    """Train each sample of each epoch once, as Horovod's elastic mode has it."""
    import horovod.torch as hvd

    hvd.init()
    sampler = hvd.elastic.ElasticSampler(range(SAMPLES))

    @hvd.elastic.run
    def loop(state: Any) -> None:
        while state.epoch < 2:
            for number, index in enumerate(state.sampler):
                if state.epoch == 1 and number == 5 and hvd.rank() == 1:
                    die(config)
                # The sampler fills the last step up with samples that it has given out already.
                place = hvd.rank() + number * hvd.size()
                mine = index if place < len(state.sampler.remaining_indices) else None
                state.seen = [*state.seen, *hvd.allgather_object(mine)]
                state.sampler.record_batch(number, 1)
                if number % 2:
                    state.commit()
            report(epoch=state.epoch, seen=sorted(each for each in state.seen if each is not None))
            state.epoch, state.seen = state.epoch + 1, []
            state.sampler.set_epoch(state.epoch)
            state.commit()

    loop(hvd.elastic.TorchState(sampler=sampler, epoch=0, seen=[]))


PHASES = ["start", "init", "step", "allreduce", "commit", "report", "checkpoint", "re-forming", "stopped"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("phases")


@pytest.fixture(scope="module")
def trials(ray_session: Any, folder: Path) -> dict[str, tuple[Any, list[dict[str, Any]]]]:
    """Each phase's trial, with its results."""
    from ray import tune

    analysis = tune.run(
        DistributedTrainableCreator(train, num_slots=3, min_workers=1, num_cpus_per_slot=0.6, timeout_s=20.0),
        config={"phase": tune.grid_search([*PHASES, "sampler"]), "folder": str(folder)},
        storage_path=str(folder / "results"),
        raise_on_failed_trial=False,
        verbose=0,
    )
    frames = analysis.trial_dataframes
    return {
        trial.config["phase"]: (
            trial,
            next(
                (frame.to_dict("records") for path, frame in frames.items() if trial.trial_id in str(path)),
                [],
            ),
        )
        for trial in analysis.trials
    }


def check_survived(trial: Any, folder: Path) -> None:
    error = Path(trial.error_file).read_text() if trial.error_file else ""
    assert trial.status == "TERMINATED" and trial.num_failures == 0, error
    assert (folder / f"{trial.config['phase']}_died").exists(), "the rank was not lost at all"


@pytest.mark.parametrize("phase", PHASES)
def test_a_trial_survives_a_loss_in_each_phase(trials: Any, folder: Path, phase: str) -> None:
    trial, records = trials[phase]
    check_survived(trial, folder)
    assert {each["epoch"] for each in records} == set(range(1, EPOCHS + 1))
    assert all(each["sum"] == sum(range(each["epoch"] + 1)) for each in records)
    assert records[-1]["world_changes"] >= (2 if phase == "re-forming" else 1)


def test_both_losses_of_a_world_that_was_formed_anew_took_place(trials: Any, folder: Path) -> None:
    assert (folder / "re-forming_died_again").exists()


def test_a_rank_that_was_stopped_is_ended(trials: Any, folder: Path) -> None:
    assert not psutil.pid_exists(int((folder / "stopped_died").read_text()))


def test_no_sample_of_an_epoch_is_trained_twice_and_none_left_out(trials: Any, folder: Path) -> None:
    trial, records = trials["sampler"]
    check_survived(trial, folder)
    assert [each["epoch"] for each in records] == [0, 1]
    assert all(each["seen"] == list(range(SAMPLES)) for each in records)
