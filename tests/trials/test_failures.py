"""A rank raises, dies, stops responding or never starts: the trial names it and leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from processes import error_of, eventually, results_of, training_processes
from ray import tune

from horovod_tune import DistributedTrainableCreator, report

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ray_session")]


@pytest.fixture(autouse=True)
def no_process_stays(ray_session):
    yield
    eventually(lambda: not training_processes(), why=training_processes)


def run_failing(tune_run, function, **settings):
    factory = {key: settings.pop(key) for key in ("timeout_s", "stall_timeout_s") if key in settings}
    trainable = DistributedTrainableCreator(function, num_slots=2, **factory)
    return tune_run(trainable, raise_on_failed_trial=False, **settings)


@pytest.mark.contract
def test_an_exception_in_one_rank_ends_the_trial_though_the_others_wait_in_an_allreduce(tune_run):
    def train(config):
        import horovod.torch as hvd
        import torch

        hvd.init()
        report(step=0)
        if config["bad"] and hvd.rank() == 1:
            raise ValueError("the data of rank 1 is broken")
        hvd.allreduce(torch.ones(4), name="together")
        report(step=1)

    analysis = run_failing(
        tune_run, train, config={"bad": tune.grid_search([True, False])}, max_concurrent_trials=1
    )
    bad, good = sorted(analysis.trials, key=lambda trial: not trial.config["bad"])
    text = error_of(bad)
    assert f"rank 1 of 2 on {os.uname().nodename} failed" in text
    first = text.splitlines()[1]  # after Tune's "Failure # 1"
    assert first.startswith("horovod_tune.errors.TrainingFailed: rank 1 of 2"), "the cause comes first"
    assert "ValueError: the data of rank 1 is broken" in text
    assert 'raise ValueError("the data of rank 1 is broken")' in text, "the rank's own line is missing"
    assert [result["step"] for result in results_of(good)] == [0, 1]


@pytest.mark.contract
def test_a_rank_that_never_enters_the_collective_is_named_by_the_stall_inspector(tune_run):
    def train(config):
        import horovod.torch as hvd
        import torch

        hvd.init()
        report(step=0)
        if hvd.rank() == 0:
            hvd.allreduce(torch.ones(1), name="gradient_of_layer_7")
        else:
            while True:
                time.sleep(0.1)

    analysis = run_failing(tune_run, train, stall_timeout_s=4)
    text = error_of(analysis.trials[0])
    assert re.search(
        r"rank 1 of 2 on \S+ hung:\n\(rank 0 on \S+ waited in a collective that not all", text
    ), text
    assert "    time.sleep(0.1)\n" in text, text
    assert text.rstrip().endswith(
        "it did not enter allreduce.gradient_of_layer_7, in which the others waited"
    ), text


@pytest.mark.slow
def test_a_rank_that_returns_while_the_others_wait_for_it_in_a_collective_is_named(tune_run):
    def train(config):
        import horovod.torch as hvd
        import torch

        os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "2"  # Horovod's own is 60
        hvd.init()
        report(step=0)
        if hvd.rank() == 0:
            hvd.allreduce(torch.ones(1), name="gradient_of_layer_7")

    began = time.monotonic()
    analysis = run_failing(tune_run, train)
    assert time.monotonic() - began < 60, "and not after stall_timeout_s=1800 s"
    text = error_of(analysis.trials[0])
    assert "rank 1 of 2 on" in text and "returned from the training function" in text, text
    assert "gradient_of_layer_7" in text


@pytest.mark.slow
def test_an_hour_between_reports_is_no_hang(tune_run):
    def train(config):
        time.sleep(26)  # longer than timeout_s: ranks reply to polls while they train
        report(step=1)

    analysis = run_failing(tune_run, train, timeout_s=12)
    assert [result["step"] for result in results_of(analysis.trials[0])] == [1]


@pytest.mark.contract
def test_a_rank_that_stops_answering_is_named(tune_run):
    def train(config):
        import horovod.torch as hvd
        import torch

        hvd.init()
        report(pid=os.getpid())
        if hvd.rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        hvd.allreduce(torch.ones(1), name="never")

    analysis = run_failing(tune_run, train, timeout_s=15)
    text = error_of(analysis.trials[0])
    assert "rank 1 of 2 on" in text and "stopped responding" in text, text


class KillOnce(tune.Callback):
    """Kills the first trial's coordinator: while it trains, or when it is handed to the next trial."""

    def __init__(self, moment):
        self.moment, self.coordinator, self.is_killed = moment, 0, False

    def on_trial_result(self, iteration, trials, trial, result, **info):
        self.coordinator = result["pid"]
        self.kill("training")

    def on_trial_complete(self, iteration, trials, trial, **info):
        self.kill("between two trials")

    def kill(self, moment):
        if moment == self.moment and not self.is_killed:
            self.is_killed = True
            os.kill(self.coordinator, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["training", "between two trials"])
def test_a_killed_coordinator_takes_its_ranks_with_it_and_is_one_failure_of_one_trial(tune_run, moment):
    def train(config):
        import horovod.torch as hvd

        hvd.init()
        for step in range(3):
            report(step=step)

    callback = KillOnce(moment)
    analysis = run_failing(
        tune_run, train, num_samples=2, max_concurrent_trials=1, max_failures=1, callbacks=[callback]
    )
    assert callback.is_killed
    assert [trial.status for trial in analysis.trials] == ["TERMINATED", "TERMINATED"]
    assert [trial.last_result["step"] for trial in analysis.trials] == [2, 2]
    assert sum(trial.num_failures for trial in analysis.trials) <= 1
