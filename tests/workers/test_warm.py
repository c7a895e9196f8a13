"""Whatever a trial does to its world or process, the next one has a sound world: the same, or a new one."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from processes import eventually
from trial_runner import TrialRunner, exists

from horovod_tune import DistributedTrainableCreator, report
from horovod_tune.errors import TrainingFailed

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("ray_session")


def sound(config: dict[str, Any]) -> None:
    """Pass only in a process and a world that are as new ones are."""
    import horovod.torch as hvd
    import torch

    assert not hvd.is_initialized()
    hvd.init()
    assert torch.is_grad_enabled()
    sums = [hvd.allreduce(torch.full((size,), hvd.rank() + 1.0), op=hvd.Sum).sum() for size in (1, 3, 2)]
    named = hvd.allreduce(torch.ones(config.get("size", 4)), name="x", op=hvd.Sum)
    assert hvd.broadcast_object(hvd.rank(), root_rank=1) == 1
    report(sums=[each.item() for each in sums], named=named.tolist(), size=hvd.size())


@pytest.fixture(scope="module")
def shared_runner(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    runner = TrialRunner(tmp_path_factory.mktemp("warm"))
    runner.run(sound)
    yield runner
    runner.close()


@pytest.fixture
def runner(shared_runner: TrialRunner) -> Any:
    """One group for all these tests; after each one the next trial has to find a sound world."""
    yield shared_runner
    (told,) = shared_runner.run(sound, size=7)
    assert (told["sums"], told["named"], told["size"]) == ([3.0, 9.0, 6.0], [2.0] * 7, 2)
    assert shared_runner.replaced_because == ""


def pids_before_and_after(runner: TrialRunner, train: Any, **arguments: Any) -> tuple[list[int], list[int]]:
    runner.run(sound)
    before = runner.pids
    runner.run(train, **arguments)
    reason = runner.replaced_because
    runner.run(sound)
    runner.coordinator.replaced_because = [reason] if reason else []
    return before, runner.pids


def is_kept(runner: TrialRunner, train: Any, **arguments: Any) -> bool:
    """Whether the trial after ``train`` runs in the same processes; no reason is given then."""
    before, after = pids_before_and_after(runner, train, **arguments)
    print("replaced because:", runner.replaced_because)
    assert (before == after) == (runner.replaced_because == "")
    assert before == after or not any(map(exists, before))
    return before == after


def test_a_trial_that_ends_leaves_its_workers(runner):
    def train(config):
        import horovod.torch as hvd

        hvd.init()
        report(rank=hvd.rank())

    assert is_kept(runner, train)


def test_a_trial_that_reports_on_all_ranks_and_is_stopped_leaves_its_workers(runner):
    def train(config):
        import horovod.torch as hvd
        import torch

        hvd.init()
        for _ in range(100):
            hvd.allreduce(torch.ones(1))
            report(rank=hvd.rank())

    assert is_kept(runner, train, stop_after=2)


def test_a_trial_that_reports_on_rank_zero_and_is_stopped_leaves_its_workers(runner):
    """Rank 1 waits in a collective that rank 0 never enters: it is thrown out, and the world made anew."""

    def train(config):
        import horovod.torch as hvd
        import torch

        hvd.init()
        for _ in range(100):
            hvd.allreduce(torch.ones(1))
            if hvd.rank() == 0:
                report(loss=1)

    assert is_kept(runner, train, stop_after=1)


def test_a_trial_that_never_uses_horovod_leaves_its_workers(runner):
    assert is_kept(runner, lambda config: report(loss=1))


def test_a_trial_that_swallows_everything_is_replaced(runner):
    def train(config):
        while True:
            try:
                report(loss=1)
            except BaseException:
                time.sleep(0.01)

    assert not is_kept(runner, train, stop_after=1)
    assert "did not leave the training function" in runner.replaced_because


def test_a_trial_that_fails_on_one_rank_is_replaced_and_its_processes_are_gone(runner):
    def train(config):
        import subprocess

        import horovod.torch as hvd
        import torch

        hvd.init()
        with open(config["child"] + str(hvd.rank()), "w") as file:
            file.write(str(subprocess.Popen(["sleep", "1000"]).pid))
        hvd.allreduce(torch.ones(1))
        if hvd.rank() == 1:
            raise RuntimeError("no luck")
        hvd.allreduce(torch.ones(1))

    runner.run(sound)
    before = runner.pids
    child = str(runner._folder / "child")
    with pytest.raises(TrainingFailed, match=r"rank 1 of 2 on \S+ failed:\n(.*\n)*.*no luck"):
        runner.run(train, child=child)
    assert not any(map(exists, before))
    children = [int(Path(child + rank).read_text()) for rank in "01"]
    eventually(lambda: not any(map(exists, children)), why="the trial's child processes are gone")
    runner.run(sound)
    assert set(runner.pids).isdisjoint(before)


def test_a_trial_that_exits_its_interpreter_is_replaced(runner):
    runner.run(sound)
    before = runner.pids
    with pytest.raises(TrainingFailed, match="SystemExit"):
        runner.run(lambda config: sys.exit(0))
    runner.run(sound)
    assert set(runner.pids).isdisjoint(before)


def test_a_trial_that_calls_shutdown_leaves_its_workers(runner):
    def train(config):
        import horovod.torch as hvd

        hvd.init()
        hvd.shutdown()

    assert is_kept(runner, train)


def test_a_trial_that_shuts_down_and_starts_again_leaves_its_workers(runner):
    def train(config):
        import horovod.torch as hvd
        import torch

        for _ in range(2):
            hvd.init()
            hvd.allreduce(torch.ones(1))
            hvd.shutdown()
        hvd.init()

    assert is_kept(runner, train)


def test_a_trial_that_shuts_down_on_one_rank_leaves_a_sound_world_or_is_replaced(runner):
    def train(config):
        import horovod.torch as hvd

        hvd.init()
        if hvd.rank() == 0:
            hvd.shutdown()

    is_kept(runner, train)


@pytest.mark.parametrize("ranks", [[0], [0, 1]])
def test_a_collective_that_was_never_waited_for_is_replaced(runner, ranks):
    def train(config):
        import horovod.torch as hvd
        import torch

        hvd.init()
        if hvd.rank() in config["ranks"]:
            hvd.allreduce_async(torch.ones(1))

    assert not is_kept(runner, train, ranks=ranks)
    assert "never waited for" in runner.replaced_because


def test_ranks_that_count_their_collectives_differently_leave_their_workers(runner):
    """Horovod pairs collectives without a name by their number on each rank."""

    def train(config):
        import horovod.torch as hvd
        import torch
        from horovod.torch import mpi_ops

        hvd.init()
        numbers = [mpi_ops.allreduce_async(torch.zeros(1), name="a")]
        if hvd.rank() == 0:
            nowhere = hvd.ProcessSet([0])
            nowhere.process_set_id = 10**6
            with pytest.raises(ValueError):
                hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=nowhere)
        numbers.append(mpi_ops.allreduce_async(torch.zeros(1), name="b"))
        for number in numbers:
            hvd.synchronize(number)
        assert numbers[1] - numbers[0] == 2 - hvd.rank()

    assert is_kept(runner, train)


def test_process_sets_of_a_trial_are_gone_after_it(runner):
    def train(config):
        import horovod.torch as hvd

        hvd.init(process_sets=[hvd.ProcessSet([0])])
        assert len(hvd.mpi_ops._basics._get_process_set_ids_and_ranks()) == 2

    def look(config):
        import horovod.torch as hvd

        hvd.init()
        assert list(hvd.mpi_ops._basics._get_process_set_ids_and_ranks()) == [0]

    assert is_kept(runner, train)
    assert is_kept(runner, look)


def test_a_trial_gets_the_world_that_its_environment_asks_for(runner):
    """A new world counts its collectives from 1; a kept one goes on counting."""

    def first_number(config):
        import horovod.torch as hvd
        import torch

        os.environ.update(config["environment"])
        hvd.init()
        handle = hvd.allreduce_async(torch.ones(1))
        hvd.synchronize(handle)
        report(number=handle)

    def number(**environment: str) -> int:
        (told,) = runner.run(first_number, environment=environment)
        assert runner.replaced_because == ""
        return told["number"]

    runner.run(sound)
    assert number() > 1
    assert number(HOROVOD_FUSION_THRESHOLD="1000") == 1
    assert number(HOROVOD_FUSION_THRESHOLD="1000") > 1
    assert number() == 1
    assert number() > 1


def test_a_thread_that_ends_by_itself_leaves_the_workers(runner):
    def train(config):
        threading.Thread(target=time.sleep, args=(0.1,)).start()

    assert is_kept(runner, train)


def test_a_thread_that_goes_on_is_replaced(runner):
    def train(config):
        threading.Thread(target=time.sleep, args=(1000,), name="prefetcher", daemon=True).start()

    assert not is_kept(runner, train)
    assert "the thread 'prefetcher' still runs" in runner.replaced_because


def test_loader_processes_that_nobody_holds_any_more_leave_the_workers(runner):
    def train(config):
        import torch

        loader = torch.utils.data.DataLoader(range(8), num_workers=1, persistent_workers=True)
        config["cycle"] = [config, iter(loader)]
        assert next(config["cycle"][1]).tolist() == [0]

    assert is_kept(runner, train)


def test_a_child_process_that_goes_on_is_ended_and_its_parent_replaced(runner):
    def train(config):
        import subprocess

        import horovod.torch as hvd

        hvd.init()
        if hvd.rank() == 1:
            Path(config["child"]).write_text(str(subprocess.Popen(["sleep", "1000"]).pid))

    child = runner._folder / "lone_child"
    assert not is_kept(runner, train, child=str(child))
    assert "child process" in runner.replaced_because
    assert not exists(int(child.read_text()))


def ignore_a_signal_in_c(config):
    import ctypes
    import signal

    ctypes.CDLL(None).signal(signal.SIGUSR2, ctypes.c_void_p(1))


def change_the_inter_op_threads(config):
    import torch

    torch.set_num_interop_threads(torch.get_num_interop_threads() + 1)


def leave_a_process_group(config):
    import torch

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def leave_files_open(config):
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(300)]
    assert len(files) == 300


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        (ignore_a_signal_in_c, "signal handlers was changed"),
        (change_the_inter_op_threads, "inter-op threads"),
        (leave_a_process_group, "torch.distributed is still initialised"),
        (leave_files_open, "files were left open"),
    ],
)
def test_what_cannot_be_put_back_is_replaced(runner, train, reason):
    assert not is_kept(runner, train)
    assert reason in runner.replaced_because


def test_without_reuse_every_trial_has_new_processes(ray_session, tmp_path):
    runner = TrialRunner(tmp_path, reuse_workers=False)

    def train(config):
        import horovod.torch as hvd

        hvd.init()
        report(pids=hvd.allgather_object(os.getpid()))

    pids = [pid for _ in range(2) for pid in runner.run(train)[0]["pids"]]
    assert runner.replaced_because == "reuse_workers=False"
    assert len(set(pids)) == 4
    runner.close()
    assert not any(map(exists, pids))


def test_a_trial_that_pauses_finds_warm_workers_when_it_goes_on(ray_session, tmp_path):
    """With one trial left to run, Tune itself would end the actor of the trial that pauses."""
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    def train(config):
        import tempfile

        from horovod_tune import get_checkpoint, report

        start = get_checkpoint()
        done = int(Path(start.path, "step").read_text()) if start is not None else 0
        for step in range(done + 1, 9):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "step").write_text(str(step))
                report(step=step, score=config["x"] * step, pid=os.getpid(), checkpoint=folder)

    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        hyperparam_mutations={"x": tune.uniform(0.1, 1)},
        quantile_fraction=0.5,
        synch=True,
    )
    analysis = tune.run(
        DistributedTrainableCreator(train, num_slots=1),
        config={"x": tune.grid_search([0.1, 0.9])},
        scheduler=scheduler,
        metric="score",
        mode="max",
        storage_path=str(tmp_path),
        verbose=0,
    )
    # A trial that takes over a finished donor's checkpoint has nothing left to report.
    assert [trial.status for trial in analysis.trials] == ["TERMINATED", "TERMINATED"]
    assert max(trial.last_result["step"] for trial in analysis.trials) == 8
    pids = set()
    for trial in analysis.trials:
        with Path(trial.local_path, "result.json").open() as results:
            pids |= {json.loads(line)["pid"] for line in results}
    # One actor for each trial, or one for both where the second trial was still starting at the first pause.
    assert len(pids) <= 2


def test_workers_are_kept_whatever_a_trainable_of_the_same_name_wanted_before(ray_session, tmp_path):
    from ray import tune

    def processes(trainable: Any) -> int:
        analysis = tune.run(
            trainable, num_samples=2, max_concurrent_trials=1, storage_path=str(tmp_path), verbose=0
        )
        return len({trial.last_result["pid"] for trial in analysis.trials})

    def plain() -> Any:
        def train(config):
            tune.report({"pid": os.getpid()})

        return train

    def train(config):
        report(pid=os.getpid())

    assert processes(plain()) == 2
    assert processes(DistributedTrainableCreator(train)) == 1
    assert processes(DistributedTrainableCreator(train, reuse_workers=False)) == 2
    assert processes(DistributedTrainableCreator(train)) == 1
