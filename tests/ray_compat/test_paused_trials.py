"""Tune's paused trials beyond `upstream/paused_trials.py`: BOHB, and a failure under HyperBand."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from ray import cloudpickle, tune
from ray.tune.schedulers import HyperBandForBOHB, HyperBandScheduler

from horovod_tune.ray_compat.patches import paused_trials

pytestmark = [pytest.mark.slow, pytest.mark.processes]

cloudpickle.register_pickle_by_value(sys.modules[__name__])


# For an experiment of seconds; one that waits forever ends then, as if it had been meant to.
PATIENCE_S = 200


def test_after_a_restore_no_bracket_of_bohb_waits_for_a_trial_that_has_ended():
    paused_trials.mend_paused_trials()
    scheduler = HyperBandForBOHB(metric="score", mode="max", max_t=4, reduction_factor=2)
    ended, waiting = (Mock(**{"is_finished.return_value": over}) for over in (True, False))
    for trial in (ended, waiting):
        scheduler.on_trial_add(None, trial)
    brackets = [bracket for band in scheduler._hyperbands for bracket in band if bracket]
    assert [trial for bracket in brackets for trial in bracket.current_trials()] == [waiting]


class FirstFails(tune.Trainable):
    """The first fails when the others wait for its report at the point where they meet."""

    def step(self):
        end = time.monotonic() + PATIENCE_S / 2
        while not self.config["strong"] and time.monotonic() < end:
            if Path(self.config["both_wait"]).exists():
                raise RuntimeError("enough")
            time.sleep(0.02)
        return {"score": self.config["strong"] + self.iteration}

    def save_checkpoint(self, checkpoint_dir):
        pass

    def load_checkpoint(self, checkpoint):
        pass


class BothWait(tune.Callback):
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def on_step_end(self, iteration, trials, **info):
        if [trial.status for trial in trials].count("PAUSED") == 2:
            self.mark.touch()


def test_the_others_of_a_bracket_continue_without_one_that_fails(ray_session, tmp_path):
    paused_trials.mend_paused_trials()
    mark, began_s = tmp_path / "both wait", time.monotonic()
    trials = tune.run(
        FirstFails,
        config={"strong": tune.grid_search([0, 1, 2]), "both_wait": str(mark)},
        metric="score",
        mode="max",
        scheduler=HyperBandScheduler(max_t=4, reduction_factor=2),
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
        callbacks=[BothWait(mark)],
        time_budget_s=PATIENCE_S,
        storage_path=str(tmp_path),
        verbose=0,
        raise_on_failed_trial=False,
    ).trials
    assert time.monotonic() - began_s < PATIENCE_S, "trials that wait were ended by the time budget"
    assert [trial.status for trial in trials] == ["ERROR", "TERMINATED", "TERMINATED"]
    assert all(trial.last_result["score"] >= 4 for trial in trials[1:])
