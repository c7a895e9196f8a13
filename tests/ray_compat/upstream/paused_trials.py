"""Trials that are paused in Tune may wait forever, lose results, or continue after they have been stopped.

1. If a trial is paused while it is being saved, its cached STOP decision stays, and ends it at its next save.
   Fix: drop the decision at the end of `TuneController.pause_trial`.
2. `stop_trial` does not mark the new state of a paused or pending trial to be saved: the trial stays PAUSED
   in `experiment_state-*.json`, and a restored experiment continues it. Fix: `_mark_trial_to_checkpoint`.
3. When a trial continues, `LoggerCallback._restore_from_remote` overwrites its local result file by an older
   copy in the storage. Fix: fetch the copy only if the local file is missing or shorter.
4. After a restore, `HyperBandScheduler.on_trial_add` adds ended trials to brackets, which then never end.
   Fix: leave out trials with `trial.is_finished()`.
5. `HyperBandScheduler` does not stop a paused trial that was still being saved when its bracket ended.
   Fix: process the bracket again when no trial is left to report.
6. `PopulationBasedTraining(synch=True)` perturbs only when the last trial reports, and waits for trials that
   have ended or failed. Fix: leave out trials with `trial.is_finished()`, and perturb when one ends.

Each test fails on Ray 2.60.0 because of the point of its number.
"""

import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pyarrow.fs
from ray import cloudpickle, tune
from ray.tune.execution.tune_controller import TuneController
from ray.tune.logger import LoggerCallback
from ray.tune.schedulers import HyperBandScheduler, PopulationBasedTraining

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the trials' processes cannot import this file

# For an experiment of seconds; one that waits forever ends then.
BUDGET_S = 30


class Member(tune.Trainable):
    def step(self):
        return {"score": self.config["strong"] + self.iteration}

    def save_checkpoint(self, checkpoint_dir):
        pass

    def load_checkpoint(self, checkpoint):
        pass


def run(trainable, strong, tmp_path, **arguments):
    return tune.run(
        trainable,
        config={"strong": tune.grid_search(strong), "x": 0.5, "folder": str(tmp_path)},
        metric="score",
        mode="max",
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
        time_budget_s=BUDGET_S,
        storage_path=str(tmp_path),
        raise_on_failed_trial=False,
        verbose=0,
        **arguments,
    ).trials


def wait_for(holds):
    end = time.monotonic() + BUDGET_S
    while not holds() and time.monotonic() < end:
        time.sleep(0.02)


class Tells(tune.Callback):
    def __init__(self, mark, holds):
        self.mark, self.holds = mark, holds

    def on_step_end(self, iteration, trials, **info):
        if self.holds(trials):
            self.mark.touch()


def controller_of(*methods):
    controller = Mock(_cached_trial_decisions={}, _trials_to_cache=set(), _trial_to_actor={})
    controller._set_trial_status = lambda trial, status: setattr(trial, "status", status)
    for name in (*methods, "_schedule_trial_stop", "_mark_trial_to_checkpoint"):
        setattr(controller, name, partial(getattr(TuneController, name), controller))
    return controller


def test_1_a_trial_that_is_paused_while_it_is_saved_does_not_end():
    trial = Mock(trial_id="a", is_saving=True, status="RUNNING")
    controller = controller_of("pause_trial", "_schedule_trial_pause")
    controller._trial_to_actor[trial] = Mock()
    controller.pause_trial(trial, should_checkpoint=False)
    assert trial.status == "PAUSED" and controller._cached_trial_decisions == {}


def test_2_the_end_of_a_paused_trial_that_is_stopped_is_saved():
    trial = Mock(trial_id="a", is_saving=False, status="PAUSED")
    controller = controller_of("stop_trial", "_schedule_graceful_trial_stop")
    controller.stop_trial(trial)
    assert trial.status == "TERMINATED" and trial in controller._trials_to_cache


def test_3_a_longer_local_result_file_is_kept(tmp_path):
    local, stored = tmp_path / "local", tmp_path / "stored"
    for folder, text in ((local, "1\n2\n"), (stored, "1\n")):
        folder.mkdir()
        (folder / "result.json").write_text(text)
    storage = SimpleNamespace(trial_fs_path=str(stored), storage_filesystem=pyarrow.fs.LocalFileSystem())
    trial = SimpleNamespace(checkpoint=True, local_path=str(local), storage=storage)
    LoggerCallback()._restore_from_remote("result.json", trial)
    assert (local / "result.json").read_text() == "1\n2\n"


def test_4_a_restored_bracket_has_no_trials_that_have_ended():
    scheduler = HyperBandScheduler(metric="score", mode="max", max_t=4, reduction_factor=2)
    ended, waiting = (Mock(**{"is_finished.return_value": over}) for over in (True, False))
    for trial in (ended, waiting):
        scheduler.on_trial_add(None, trial)
    brackets = [bracket for band in scheduler._hyperbands for bracket in band if bracket]
    assert [trial for bracket in brackets for trial in bracket.current_trials()] == [waiting]


def test_5_a_trial_that_is_being_saved_when_its_bracket_ends_ends_too(tmp_path):
    saves, reported = tmp_path / "saves", tmp_path / "reported"

    class SlowlySaved(Member):
        def step(self):
            if self.config["strong"] and self.iteration == 3:
                wait_for(Path(self.config["folder"], "saves").exists)
            return super().step()

        def save_checkpoint(self, checkpoint_dir):
            if not self.config["strong"] and self.iteration == 4:
                Path(self.config["folder"], "saves").touch()
                wait_for(Path(self.config["folder"], "reported").exists)

    tells = Tells(reported, lambda trials: trials[1].last_result.get("training_iteration", 0) >= 4)
    scheduler = HyperBandScheduler(max_t=4, reduction_factor=2)
    began_s = time.monotonic()
    run(SlowlySaved, [0, 1], tmp_path, scheduler=scheduler, callbacks=[tells])
    assert saves.exists() and time.monotonic() - began_s < BUDGET_S


def test_6_a_population_continues_without_a_trial_that_ended_early(tmp_path):
    class Leaves(Member):
        def step(self):
            if not self.config["strong"]:
                wait_for(Path(self.config["folder"], "both wait").exists)
            return {"done": not self.config["strong"], **super().step()}

    tells = Tells(tmp_path / "both wait", lambda trials: [t.status for t in trials].count("PAUSED") == 2)
    population = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        hyperparam_mutations={"x": tune.uniform(0, 1)},
        quantile_fraction=0.5,
        synch=True,
    )
    trials = run(Leaves, [0, 1, 2], tmp_path, scheduler=population, stop={"score": 7}, callbacks=[tells])
    assert all(trial.last_result["score"] >= 7 for trial in trials[1:])
