"""Elastic trials: what is left of a world continues when a rank is lost in any phase, and grows again.

Each trial sums the numbers of its epochs, so that a step done twice or left out shows in every later sum.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import psutil
import pytest
from processes import records_of

from horovod_tune import DistributedTrainableCreator, commit, get_state, get_world, report

pytestmark = [pytest.mark.slow, pytest.mark.processes]

pytest.importorskip("horovod")
cloudpickle.register_pickle_by_value(sys.modules[__name__])

EPOCHS = 8
MOST_EPOCHS = 3000
SAMPLES = 36
TIMEOUT_S = 20.0


def died(config: dict[str, Any], name: str = "died") -> Path:
    """Return the file that says that a rank of this trial was lost, and which process that was."""
    return Path(config["folder"]) / f"{config['phase']}_{name}"


def die(config: dict[str, Any], name: str = "died", *, by: int = signal.SIGKILL) -> None:
    """Kill this process, the first time that any rank comes here under ``name``."""
    try:
        with died(config, name).open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return
    # To this thread: `os.kill` to a process wakes its main thread, and this one may continue until that runs.
    signal.pthread_kill(threading.get_ident(), by)


def die_soon(config: dict[str, Any], name: str = "died") -> None:
    """Kill this process from another thread, a moment after what comes next has begun."""
    timer = threading.Timer(0.01, die, [config, name])
    timer.daemon = True
    timer.start()


class DiesWhenCopied:
    """A part of a state, during whose commit the process dies."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def __deepcopy__(self, memo: Any) -> None:
        die(self.config)


def die_before_the_world_is_there(config: dict[str, Any]) -> None:
    """Lose this rank as the phase has it, before it makes its world."""
    phase, rank, size = config["phase"], get_world().rank, get_world().size
    seen = died(config, f"seen_{os.getpid()}")
    is_new = not seen.exists()
    seen.touch()
    one_is_lost = died(config).exists()
    match phase:
        case "init" if rank == 1 and not one_is_lost:
            die_soon(config)
        case "re-forming, in init" if rank == 1 and one_is_lost:
            die_soon(config, "died_again")
        case "joining" if is_new and one_is_lost:
            die(config, "died_again")
        case "growing" if rank == 0 and size == 3 and one_is_lost:
            die(config, "died_again")
        case "start, rank 0" if rank == 0:
            die(config)


def init(config: dict[str, Any]) -> Any:
    """Make the world again; return Horovod, or what works like it on torch.distributed."""
    if config["backend"] == "horovod":
        import horovod.torch as hvd

        hvd.init()
        return hvd
    import torch.distributed as dist

    def allreduce_async(tensor: Any) -> tuple[Any, Any]:
        return tensor, dist.all_reduce(tensor, async_op=True)

    def synchronize(work: tuple[Any, Any]) -> Any:
        work[1].wait()
        return work[0] / dist.get_world_size()

    if config["phase"] in LAST:
        dist.destroy_process_group()
        dist.init_process_group("gloo")
    places = {"rank": dist.get_rank, "size": dist.get_world_size}
    return SimpleNamespace(allreduce_async=allreduce_async, synchronize=synchronize, **places)


def train(config: dict[str, Any]) -> None:
    """Sum the epochs' numbers, and lose ranks on the way."""
    if config["phase"] == "sampler":
        train_with_a_sampler(config)
        return
    import torch

    phase = config["phase"]
    die_before_the_world_is_there(config)
    hvd = init(config)
    hvd.synchronize(hvd.allreduce_async(torch.zeros(1)))
    state = get_state() or {"epoch": 0, "sum": 0.0, "is_over": False}
    while state["epoch"] < EPOCHS or (not state["is_over"] and state["epoch"] < MOST_EPOCHS):
        epoch = state["epoch"] + 1
        if epoch > EPOCHS:
            time.sleep(0.02)  # others are starting
        world = get_world()
        assert (world.rank, world.size) == (hvd.rank(), hvd.size())
        is_it = epoch == 4 and not died(config).exists()
        if is_it and hvd.rank() == 1 and phase in (*TWICE, "lost"):
            die(config)
        if is_it and phase == "grows":
            died(config).touch()
        if is_it and hvd.rank() == 1 and phase == "hung":
            died(config).touch()
            time.sleep(10_000)
        if is_it and hvd.rank() == 2 and phase == "stopped":
            die(config, by=signal.SIGSTOP)
        was_lost = float(died(config, LAST.get(phase, "died")).exists())
        work = hvd.allreduce_async(torch.tensor([epoch, was_lost], dtype=torch.float64))
        if is_it and hvd.rank() == 1 and phase == "allreduce":
            die(config)
        mean, lost = hvd.synchronize(work).tolist()
        is_over = lost == 1.0 and hvd.size() >= config["until"]
        state = {"epoch": epoch, "sum": state["sum"] + mean, "is_over": is_over}
        with tempfile.TemporaryDirectory() as folder:
            if hvd.rank() == 0:
                Path(folder, "state").write_bytes(os.urandom(1 << 20 if phase in LAST else 1))
            if is_it and hvd.rank() == 0 and phase == "report":
                die_soon(config)
            place = {"size": world.size, "changes": world.changes, "pid": os.getpid()}
            report(**state, **place, checkpoint=folder)
        if is_it and hvd.rank() == 1 and phase == "commit":
            commit({**state, "bomb": DiesWhenCopied(config)})
        commit(state)


def wait_for_the_end_of_the_world() -> None:
    """Return when Horovod's world has been ended by another rank's loss; nothing collective is called."""
    import horovod.torch as hvd

    end = time.monotonic() + 120
    while hvd.is_initialized():
        assert time.monotonic() < end, "the world of a lost rank does not end"
        time.sleep(0.01)


def train_with_a_sampler(config: dict[str, Any]) -> None:
    """Train each sample of each epoch once, as Horovod's elastic mode has it."""
    import horovod.torch as hvd
    import torch
    from horovod.common import elastic
    from horovod.runner.elastic.worker import WorkerNotificationManager

    with pytest.raises(ValueError, match="Horovod has not been initialized"):
        hvd.rank()
    hvd.init()
    sampler = hvd.elastic.ElasticSampler(range(SAMPLES))  # which asks for its rank when it is restored
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    resets: list[int] = []

    @hvd.elastic.run
    def loop(state: Any) -> None:
        # Horovod's own would listen on a port.
        assert not isinstance(elastic.notification_manager, WorkerNotificationManager)
        while state.epoch < 2:
            for number, index in enumerate(state.sampler):
                if state.epoch == 1 and number == 5 and get_world().changes == 0:
                    if hvd.rank() == 1:
                        die(config)
                    wait_for_the_end_of_the_world()
                    assert hvd.global_process_set.rank() == hvd.rank(), "known in a world that has ended"
                # The sampler fills the last step up with samples that it has given out already.
                place = hvd.rank() + number * hvd.size()
                mine = index if place < len(state.sampler.remaining_indices) else None
                # Named: Horovod names it by the object's type, and None is another one.
                state.seen = [*state.seen, *hvd.allgather_object(mine, name="sample")]
                state.sampler.record_batch(number, 1)
                if number % 2:
                    state.commit()
            with torch.no_grad():
                state.model.weight += state.epoch + 1
            weight = hvd.allreduce(state.model.weight.detach()).item()
            seen = sorted(each for each in state.seen if each is not None)
            report(epoch=state.epoch, seen=seen, weight=weight, resets=len(resets))
            state.epoch, state.seen = state.epoch + 1, []
            state.sampler.set_epoch(state.epoch)
            state.commit()

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0, seen=[])
    state.register_reset_callbacks([lambda: resets.append(hvd.size())])
    loop(state)


ONCE = ("start, rank 0", "init", "allreduce", "commit", "report", "stopped")
# Two ranks are lost: the second one while the others re-form, or while one joins them.
TWICE = ("re-forming, in init", "joining", "growing")
LAST = {**dict.fromkeys(ONCE, "died"), **dict.fromkeys(TWICE, "died_again")}


@pytest.fixture(scope="module", params=["horovod", "torch"])
def trials(
    request: pytest.FixtureRequest, ray_session: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Any, list[dict[str, Any]]]]:
    """Each phase's trial, with its results."""
    from ray import tune

    backend, folder = request.param, tmp_path_factory.mktemp(request.param)
    phases = [*LAST, "sampler"] if backend == "horovod" else list(LAST)
    analysis = tune.run(
        # Two trials at a time on the session's 4 CPUs.
        DistributedTrainableCreator(
            train, backend=backend, num_slots=3, min_workers=1, num_cpus_per_slot=0.6, timeout_s=TIMEOUT_S
        ),
        config={"phase": tune.grid_search(phases), "folder": str(folder), "backend": backend, "until": 1},
        storage_path=str(folder / "results"),
        raise_on_failed_trial=False,
        verbose=0,
    )
    frames = analysis.trial_dataframes
    return {
        trial.config["phase"]: (trial, frames[trial.trial_id].to_dict("records")) for trial in analysis.trials
    }


def check_survived(trial: Any) -> None:
    error = Path(trial.error_file).read_text() if trial.error_file else ""
    assert trial.status == "TERMINATED" and trial.num_failures == 0, error
    assert died(trial.config).exists(), "the rank was not lost at all"


def check_sums(records: list[dict[str, Any]]) -> None:
    """Every epoch is there, and its sum is an undisturbed run's."""
    assert {each["epoch"] for each in records} == set(range(1, records[-1]["epoch"] + 1))
    assert all(each["sum"] == sum(range(each["epoch"] + 1)) for each in records)
    assert EPOCHS <= records[-1]["epoch"] < MOST_EPOCHS


@pytest.mark.parametrize("phase", LAST)
def test_a_trial_survives_a_loss_in_each_phase(trials: Any, phase: str) -> None:
    trial, records = trials[phase]
    check_survived(trial)
    assert died(trial.config, LAST[phase]).exists(), "the second rank was not lost"
    check_sums(records)
    assert all(later["epoch"] <= each["epoch"] + 1 for each, later in itertools.pairwise(records))
    assert records[-1]["world_changes"] >= 1
    if phase == "allreduce":
        changes = [each["world_change"] for each in records]
        assert any("rank 1 on" in each and "died: process" in each for each in changes), "who and why"
    if phase == "stopped":
        assert not psutil.pid_exists(int(died(trial.config).read_text())), "it is ended"


@pytest.mark.parametrize("trials", ["horovod"], indirect=True)
def test_no_sample_of_an_epoch_is_trained_twice_and_none_left_out(trials: Any) -> None:
    trial, records = trials["sampler"]
    check_survived(trial)
    assert [each["epoch"] for each in records] == [0, 1]
    assert all(each["seen"] == list(range(SAMPLES)) for each in records)
    assert [each["weight"] for each in records] == [1.0, 3.0], "on every rank"
    assert records[-1]["resets"] >= 1


@pytest.mark.parametrize(
    ("phase", "options"),
    [
        pytest.param("lost", {"num_slots": 3, "min_workers": 2}, marks=pytest.mark.contract),
        ("hung", {"num_slots": 3, "min_workers": 2, "timeout_s": 10, "stall_timeout_s": 6}),
        (
            "hung",
            {"num_slots": 3, "min_workers": 2, "timeout_s": 30, "stall_timeout_s": 6, "backend": "torch"},
        ),
        ("grows", {"min_workers": 1, "max_workers": 3}),
    ],
)
def test_a_rank_that_was_lost_or_hung_comes_back_and_a_trial_grows(
    tune_run: Any, tmp_path: Path, phase: str, options: dict[str, Any]
) -> None:
    config = {
        "phase": phase,
        "folder": str(tmp_path),
        "backend": options.get("backend", "horovod"),
        "until": 3,
    }
    analysis = tune_run(
        DistributedTrainableCreator(train, **options), config=config, raise_on_failed_trial=False
    )
    records = records_of(analysis)
    assert died(config).exists()
    check_sums(records)
    assert all(each["changes"] == each["world_changes"] for each in records), "ranks know it"
    sizes = [each["size"] for each in records]
    assert sizes[-1] == 3
    if phase == "grows":
        assert sizes[0] == 1
        return
    assert records[0]["pid"] == records[-1]["pid"], "rank 0 keeps its process"
    first = next(number for number, each in enumerate(records) if each["world_changes"])
    before, after = records[first - 1], records[first]
    assert before["world_size"] == 3
    assert (
        "rank 1 on" in after["world_change"]
        and {"lost": "died", "hung": "hung"}[phase] in after["world_change"]
    )
    if phase == "lost":
        assert sizes == [3] * len(sizes), "its actor starts a new one at once"
        assert (before["world_changes"], after["world_changes"]) == (0, 1)
        assert before["world_change_s"] == 0 < after["world_change_s"]
