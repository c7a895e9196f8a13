"""What Tune does to trials that pause, on plain trainables: it has nothing to do with ranks."""

from __future__ import annotations

import time

from ray import tune
from ray.tune.schedulers import PopulationBasedTraining

from horovod_tune import ray_adapter


def test_a_trial_that_is_exploited_while_it_is_saved_goes_on(ray_session, tmp_path):
    class Member(tune.Trainable):
        """The weak one of the two is still being saved when the strong one reports, and is then exploited."""

        def setup(self, config):
            self.strong = config["strong"]

        def step(self):
            time.sleep(0.5 if self.strong else 0)
            return {"score": self.strong + self.iteration}

        def save_checkpoint(self, checkpoint_dir):
            if self.iteration == 2 and not self.strong:
                time.sleep(3)

        def load_checkpoint(self, checkpoint):
            pass

    ray_adapter.forget_stops_of_paused_trials()
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        hyperparam_mutations={"x": tune.uniform(0, 1)},
        quantile_fraction=0.5,
        synch=True,
    )
    analysis = tune.run(
        Member,
        config={"strong": tune.grid_search([0, 1]), "x": 0.5},
        metric="score",
        mode="max",
        scheduler=scheduler,
        stop={"training_iteration": 6},
        checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
        time_budget_s=120,
        storage_path=str(tmp_path),
        verbose=0,
    )
    assert [trial.last_result["training_iteration"] for trial in analysis.trials] == [6, 6]
