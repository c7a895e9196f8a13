"""What one trial does to itself, or what happens between two trials, does not cost another trial anything."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import cloudpickle
import pytest
from ray import tune

from horovod_tune import DistributedTrainableCreator

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ray_session")]


class KillOnce(tune.Callback):
    """Kills the first trial's coordinator when that trial is complete: when it is handed to the next."""

    def __init__(self) -> None:
        self.coordinator = 0
        self.killed = 0

    def on_trial_result(self, iteration, trials, trial, result, **info):
        self.coordinator = result["pid"]

    def on_trial_complete(self, iteration, trials, trial, **info):
        if not self.killed:
            self.killed = self.coordinator
            os.kill(self.killed, signal.SIGKILL)


def test_the_death_of_a_coordinator_between_two_trials_is_one_failure_of_one_trial(tune_run):
    def train(config):
        from horovod_tune import report

        report(loss=1.0)

    callback = KillOnce()
    analysis = tune_run(
        DistributedTrainableCreator(train, num_slots=1),
        num_samples=2,
        max_concurrent_trials=1,
        max_failures=1,
        metric="loss",
        mode="min",
        callbacks=[callback],
        raise_on_failed_trial=False,
    )
    assert callback.killed
    assert [trial.status for trial in analysis.trials] == ["TERMINATED", "TERMINATED"]
    assert sum(trial.num_failures for trial in analysis.trials) <= 1


def test_trials_that_harm_themselves_leave_the_others_alone(tune_run):
    def train(config):
        import shutil

        from horovod_tune import report

        if config["kind"] == "reports nothing":
            return
        if config["kind"] == "a large integer":
            report(loss=1.0, count=2**200)
        if config["kind"] == "a huge error":
            raise ValueError("the start " + "x" * (20 << 20) + " the end")
        report(loss=1.0)
        if config["kind"] == "removes its directory":
            shutil.rmtree(os.getcwd(), ignore_errors=True)

    kinds = ["reports nothing", "a large integer", "a huge error", "removes its directory", "sound"]
    analysis = tune_run(
        DistributedTrainableCreator(train, num_slots=1),
        config={"kind": tune.grid_search(kinds), "one": 1, "more": 2},
        max_concurrent_trials=1,
        metric="loss",
        mode="min",
        raise_on_failed_trial=False,
    )
    status = {trial.config["kind"]: trial.status for trial in analysis.trials}
    assert status == {
        "reports nothing": "TERMINATED",
        "a large integer": "ERROR",
        "a huge error": "ERROR",
        "removes its directory": "TERMINATED",
        "sound": "TERMINATED",
    }
    errors = {
        trial.config["kind"]: Path(trial.path, "error.txt").read_text()
        for trial in analysis.trials
        if trial.status == "ERROR"
    }
    assert "metric 'count' is an integer of 201 bits" in errors["a large integer"]
    huge = errors["a huge error"]
    assert len(huge) < 1_000_000 and "the start" in huge and "the end" in huge
