"""What Tune does to trials that pause, on plain trainables: it has nothing to do with ranks."""

from __future__ import annotations

import sys
import time

import pytest
from ray import cloudpickle, tune
from ray.tune.schedulers import HyperBandScheduler, PopulationBasedTraining

from horovod_tune import ray_adapter

cloudpickle.register_pickle_by_value(sys.modules[__name__])


# For an experiment of seconds; one that waits for ever ends then, as if it had been meant to.
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
    ray_adapter.end_waits_of_paused_trials()

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


def iterations(trials):
    return [trial.last_result["training_iteration"] for trial in trials]


def test_a_trial_that_is_exploited_while_it_is_saved_goes_on(trials_of):
    class SlowlySaved(Member):
        """The weak one of the two is still being saved when the strong one reports, and is then exploited."""

        def step(self):
            time.sleep(0.5 if self.strong else 0)
            return super().step()

        def save_checkpoint(self, checkpoint_dir):
            if self.iteration == 2 and not self.strong:
                time.sleep(3)

    trials = trials_of(SlowlySaved, [0, 1], scheduler=population_based(), stop={"training_iteration": 6})
    assert iterations(trials) == [6, 6]


def test_a_trial_that_is_being_saved_when_its_bracket_ends_ends_too(trials_of):
    class SlowlySaved(Member):
        """Both reach their bracket's end, the weak one first; it is being paused when the strong one does."""

        def step(self):
            time.sleep(0.5 if self.strong else 0)
            return super().step()

        def save_checkpoint(self, checkpoint_dir):
            if self.iteration == 4 and not self.strong:
                time.sleep(5)

    trials = trials_of(SlowlySaved, [0, 1], scheduler=hyper_band())
    assert iterations(trials) == [4, 4]
    assert [trial.status for trial in trials] == ["TERMINATED"] * 2
    assert trials[0].checkpoint.path.endswith("3"), "the save that was waited for is lost"


@pytest.mark.parametrize(
    ("scheduler", "meeting", "stop"), [(hyper_band, 4, {}), (population_based, 2, {"score": 7})]
)
@pytest.mark.parametrize("end", ["fails", "ends early"])
def test_the_others_go_on_without_one_that(trials_of, tmp_path, scheduler, meeting, stop, end):
    class Leaves(Member):
        """The first has had enough when the others wait for its report at the point where they meet."""

        def step(self):
            if not self.strong:
                while len(list(tmp_path.glob("waits-*"))) < 2:
                    time.sleep(0.1)
                time.sleep(2)
                if end == "fails":
                    raise RuntimeError("enough")
            return {"done": not self.strong, **super().step()}

        def save_checkpoint(self, checkpoint_dir):
            if self.iteration == meeting:
                (tmp_path / f"waits-{self.strong}").touch()

    trials = trials_of(Leaves, [0, 1, 2], scheduler=scheduler(), stop=stop)
    assert [trial.status for trial in trials] == [
        "ERROR" if end == "fails" else "TERMINATED",
        *["TERMINATED"] * 2,
    ]
    assert all(trial.last_result["score"] >= (7 if stop else 4) for trial in trials[1:])
