"""The death of an actor that is being reset for its next trial counts as two failures of that trial.

With `reuse_actors=True`, `TuneController` calls `_trial_task_failure` twice if an actor dies in
`reset_config`: for the actor, and for the call. Each increases `Trial.num_failures`, so that with
`max_failures=1` the first death ends the trial.

Proposed fix: when an actor dies, remove its trial from `_resetting_trials`, and count each exception once.
Checked with Ray 2.60.0.
"""

import os
import sys

from ray import cloudpickle, tune

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # the trials' processes cannot import this file


class DiesInItsReset(tune.Trainable):
    def step(self):
        return {"score": 1, "done": True}

    def save_checkpoint(self, checkpoint_dir):
        pass

    def load_checkpoint(self, checkpoint):
        pass

    def reset_config(self, new_config):
        os._exit(1)


def test_an_actor_that_dies_in_its_reset_counts_as_one_failure(tmp_path):
    results = tune.run(
        DiesInItsReset,
        num_samples=2,
        max_concurrent_trials=1,
        max_failures=1,
        reuse_actors=True,
        raise_on_failed_trial=False,
        storage_path=str(tmp_path),
        verbose=0,
    )
    assert [(trial.status, trial.num_failures) for trial in results.trials] == [
        ("TERMINATED", 0),
        ("TERMINATED", 1),
    ]
