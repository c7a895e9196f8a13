"""What Tune does to trials that pause, on plain trainables: it has nothing to do with ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from ray import cloudpickle, tune
from ray.tune.schedulers import HyperBandForBOHB, HyperBandScheduler, PopulationBasedTraining

from horovod_tune.analysis import analyze
from horovod_tune.ray_compat.patches import paused_trials

pytestmark = [pytest.mark.slow, pytest.mark.processes]

cloudpickle.register_pickle_by_value(sys.modules[__name__])


# For an experiment of seconds; one that waits forever ends then, as if it had been meant to.
PATIENCE_S = 200


class Member(tune.Trainable):
    """One of two or more: `strong` says by how much its score is ahead."""

    def setup(self, config):
        self.strong = config["strong"]

    def reset_config(self, config):
        self.strong = config["strong"]
        return True

    def step(self):
        return {"score": self.strong + self.iteration}

    def save_checkpoint(self, checkpoint_dir):
        pass

    def load_checkpoint(self, checkpoint):
        pass


def wait_for(mark: Path) -> None:
    end = time.monotonic() + PATIENCE_S / 2
    while not mark.exists():
        assert time.monotonic() < end, f"no {mark.name}"
        time.sleep(0.02)


class Tells(tune.Callback):
    """Leaves a mark for trials when Tune, in the driver, has come so far."""

    def __init__(self, mark: Path, holds: Callable[[list], bool]) -> None:
        self.mark, self.holds = mark, holds

    def on_step_end(self, iteration, trials, **info):
        if self.holds(trials):
            self.mark.touch()


def population_based():
    return PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        hyperparam_mutations={"x": tune.uniform(0, 1)},
        quantile_fraction=0.5,
        synch=True,
    )


def hyper_band():
    return HyperBandScheduler(max_t=4, reduction_factor=2)


@pytest.fixture
def trials_of(ray_session, tmp_path):
    """Run one trial for each `strong`, and return them."""
    paused_trials.mend_paused_trials()

    def run(trainable, strong, **arguments):
        began_s = time.monotonic()
        analysis = tune.run(
            trainable,
            config={"strong": tune.grid_search(strong), "x": 0.5},
            metric="score",
            mode="max",
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
            time_budget_s=PATIENCE_S,
            storage_path=str(tmp_path),
            verbose=0,
            raise_on_failed_trial=False,
            reuse_actors=True,
            **arguments,
        )
        assert time.monotonic() - began_s < PATIENCE_S, "trials that wait were ended by the time budget"
        return analysis.trials

    return run


@pytest.mark.parametrize("kind", [HyperBandScheduler, HyperBandForBOHB])
def test_after_a_restore_no_bracket_waits_for_a_trial_that_has_ended(kind):
    paused_trials.mend_paused_trials()
    scheduler = kind(metric="score", mode="max", max_t=4, reduction_factor=2)
    ended, waiting = (Mock(**{"is_finished.return_value": over}) for over in (True, False))
    for trial in (ended, waiting):
        scheduler.on_trial_add(None, trial)
    brackets = [bracket for band in scheduler._hyperbands for bracket in band if bracket]
    assert [trial for bracket in brackets for trial in bracket.current_trials()] == [waiting]


def iterations(trials):
    return [trial.last_result["training_iteration"] for trial in trials]


@pytest.fixture
def slowly_saved(tmp_path):
    """Make a `Member` whose weak one is being saved at `iteration` until the strong one's report has come."""

    def make(iteration):
        saves, reported = tmp_path / "saves", tmp_path / "reported"

        class SlowlySaved(Member):
            def step(self):
                if self.strong and self.iteration + 1 == iteration:
                    wait_for(saves)
                return super().step()

            def save_checkpoint(self, checkpoint_dir):
                if not self.strong and self.iteration == iteration:
                    saves.touch()
                    wait_for(reported)

        def has_reported(trials):
            return trials[1].last_result.get("training_iteration", 0) >= iteration

        return SlowlySaved, Tells(reported, has_reported)

    return make


def test_a_trial_that_is_being_saved_continues_from_the_strong_ones_checkpoint(trials_of, slowly_saved):
    member, tells = slowly_saved(2)

    class Remembers(member):
        came_from = None

        def step(self):
            return {**super().step(), "came_from": self.came_from}

        def save_checkpoint(self, checkpoint_dir):
            super().save_checkpoint(checkpoint_dir)
            Path(checkpoint_dir, "strong").write_text(str(self.strong))

        def load_checkpoint(self, checkpoint_dir):
            self.came_from = int(Path(checkpoint_dir, "strong").read_text())

    trials = trials_of(
        Remembers, [0, 1], scheduler=population_based(), stop={"training_iteration": 3}, callbacks=[tells]
    )
    assert [trial.last_result["came_from"] for trial in trials] == [1, 1]


def test_a_trial_that_is_being_saved_when_its_bracket_ends_ends_too(trials_of, slowly_saved):
    member, tells = slowly_saved(4)
    trials = trials_of(member, [0, 1], scheduler=hyper_band(), callbacks=[tells])
    assert iterations(trials) == [4, 4]
    assert [trial.status for trial in trials] == ["TERMINATED"] * 2
    assert trials[0].checkpoint.path.endswith("3"), "the save that was waited for is lost"


@pytest.mark.parametrize(
    ("scheduler", "stop", "end"),
    [(hyper_band, {}, "fails"), (population_based, {"score": 7}, "ends early")],
)
def test_the_others_continue_without_one_that(trials_of, tmp_path, scheduler, stop, end):
    both_wait = tmp_path / "both wait"

    class Leaves(Member):
        """The first has had enough when the others wait for its report at the point where they meet."""

        def step(self):
            if not self.strong:
                wait_for(both_wait)
                if end == "fails":
                    raise RuntimeError("enough")
            return {"done": not self.strong, **super().step()}

    tells = Tells(both_wait, lambda trials: [trial.status for trial in trials].count("PAUSED") == 2)
    trials = trials_of(Leaves, [0, 1, 2], scheduler=scheduler(), stop=stop, callbacks=[tells])
    assert [trial.status for trial in trials] == [
        "ERROR" if end == "fails" else "TERMINATED",
        *["TERMINATED"] * 2,
    ]
    assert all(trial.last_result["score"] >= (7 if stop else 4) for trial in trials[1:])


def test_paused_trials_that_are_stopped_have_ended_in_the_files(trials_of, tmp_path):
    trials = trials_of(Member, [0, 1, 2, 3, 4, 5], scheduler=hyper_band(), name="ended")
    assert {trial.status for trial in trials} == {"TERMINATED"} and len(set(iterations(trials))) > 1
    assert {trial.status for trial in analyze(tmp_path / "ended").trials} == {"TERMINATED"}
