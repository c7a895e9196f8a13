"""What a trial leaves in its processes is removed, or the next trial gets new processes."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import cloudpickle
import pytest
from processes import eventually
from trial_runner import exists, is_kept

from horovod_tune import report
from horovod_tune.errors import TrainingFailed

pytestmark = [pytest.mark.processes, pytest.mark.slow]

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_workers_of_a_trial_that_ignores_the_stop_are_replaced(runner):
    def train(config):
        while True:
            try:
                report(loss=1)
            except BaseException:
                time.sleep(0.01)

    assert not is_kept(runner, train, stop_after=1)
    assert "did not leave the training function" in runner.replaced_because


def test_workers_are_kept_if_a_thread_ends_by_itself(runner):
    def train(config):
        threading.Thread(target=time.sleep, args=(0.1,)).start()

    assert is_kept(runner, train)


def test_workers_are_kept_if_the_processes_of_a_data_loader_are_garbage(runner):
    def train(config):
        import torch

        loader = torch.utils.data.DataLoader(range(8), num_workers=1, persistent_workers=True)
        config["cycle"] = [config, iter(loader)]
        assert next(config["cycle"][1]).tolist() == [0]

    assert is_kept(runner, train)


def test_a_child_process_that_still_runs_is_killed_and_its_parent_replaced(runner):
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


def test_the_child_processes_of_a_failed_trial_are_killed(runner):
    def train(config):
        import subprocess

        import horovod.torch as hvd
        import torch

        hvd.init()
        Path(f"{config['child']}{hvd.rank()}").write_text(str(subprocess.Popen(["sleep", "1000"]).pid))
        hvd.allreduce(torch.ones(1))
        raise RuntimeError("no luck")

    child = str(runner._folder / "child")
    with pytest.raises(TrainingFailed, match="no luck"):
        runner.run(train, child=child)
    children = [int(Path(child + rank).read_text()) for rank in "01"]
    eventually(lambda: not any(map(exists, children)), why="the trial's child processes are gone")


def leave_a_process_group(config):
    import torch

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


def close_stdout(config):
    print("before")
    sys.stdout.close()


@pytest.mark.parametrize(
    ("train", "reason"),
    [
        (leave_a_process_group, "torch.distributed is still initialised"),
        (close_stdout, "sys.stdout was closed"),
    ],
)
def test_workers_with_a_change_that_cannot_be_restored_are_replaced(runner, train, reason):
    assert not is_kept(runner, train)
    assert reason in runner.replaced_because
