"""A rank raises, dies, stops responding or never starts: the trial names it and leaves no process behind."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import cloudpickle
import pytest
from processes import error_of, eventually, results_of, training_processes
from ray import tune

from horovod_tune import DistributedTrainableCreator, report

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ray_session")]

cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(autouse=True)
def no_process_stays(ray_session):
    yield
    eventually(lambda: not training_processes(), why=training_processes)


def train(config):
    """Reduce once; rank 1 does not take part, in the trial's way."""
    import horovod.torch as hvd
    import torch

    if config["way"] == "returns":
        os.environ["HOROVOD_STALL_CHECK_TIME_SECONDS"] = "2"  # Horovod's own is 60
    hvd.init()
    report(step=0)
    if hvd.rank() == 1:
        match config["way"]:
            case "raises":
                raise ValueError("the data of rank 1 is broken")
            case "returns":
                return
            case "stops":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "hangs":
                while True:
                    time.sleep(0.1)
    hvd.allreduce(torch.ones(4), name="gradient_of_layer_7")
    report(step=1)


@pytest.mark.parametrize(
    ("way", "options", "parts"),
    [
        pytest.param(
            "raises",
            {},
            [
                # After Tune's "Failure # 1" the cause comes first; the rank's own line is there.
                rf"^.*\nhorovod_tune.errors.TrainingFailed: rank 1 of 2 on {os.uname().nodename} failed",
                r'raise ValueError\("the data of rank 1 is broken"\)',
                "ValueError: the data of rank 1 is broken",
            ],
            marks=pytest.mark.contract,
        ),
        # The stall inspector names it and the collective.
        pytest.param(
            "hangs",
            {"stall_timeout_s": 4},
            [
                r"rank 1 of 2 on \S+ hung:\n\(rank 0 on \S+ waited in a collective that not all",
                r"    time\.sleep\(0\.1\)\n",
                r"it did not enter allreduce\.gradient_of_layer_7, in which the others waited\s*\Z",
            ],
            marks=pytest.mark.contract,
        ),
        pytest.param(
            "returns",
            {},
            [r"rank 1 of 2 on (.|\n)*returned from the training function", "gradient_of_layer_7"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "stops", {"timeout_s": 15}, ["rank 1 of 2 on .* stopped responding"], marks=pytest.mark.contract
        ),
    ],
)
def test_a_rank_that_does_not_enter_a_collective_ends_the_trial_and_is_named(tune_run, way, options, parts):
    began = time.monotonic()
    trainable = DistributedTrainableCreator(train, num_slots=2, **options)
    config = {"way": tune.grid_search([way, "none"] if way == "raises" else [way])}
    analysis = tune_run(trainable, config=config, max_concurrent_trials=1, raise_on_failed_trial=False)
    assert way != "returns" or time.monotonic() - began < 60, "and not after stall_timeout_s=1800 s"
    bad, *good = analysis.trials
    for part in parts:
        assert re.search(part, error_of(bad)), error_of(bad)
    assert all([result["step"] for result in results_of(trial)] == [0, 1] for trial in good)


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
    one_at_a_time = {"num_samples": 2, "max_concurrent_trials": 1, "max_failures": 1}
    trainable = DistributedTrainableCreator(train, num_slots=2)
    analysis = tune_run(trainable, raise_on_failed_trial=False, callbacks=[callback], **one_at_a_time)
    assert callback.is_killed
    assert [trial.status for trial in analysis.trials] == ["TERMINATED", "TERMINATED"]
    assert [trial.last_result["step"] for trial in analysis.trials] == [2, 2]
    assert sum(trial.num_failures for trial in analysis.trials) <= 1
