"""Actors are kept through what Tune does with trials; for pauses, `test_checkpoints.py` looks at this."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from horovod_tune import DistributedTrainableCreator, report

pytestmark = [pytest.mark.slow, pytest.mark.processes]

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_actors_are_kept_whatever_a_trainable_of_the_same_name_wanted_before(ray_session, tmp_path):
    from ray import tune

    def processes(trainable: Any) -> int:
        analysis = tune.run(
            trainable, num_samples=2, max_concurrent_trials=1, storage_path=str(tmp_path), verbose=0
        )
        return len({trial.last_result["pid"] for trial in analysis.trials})

    def plain() -> Any:
        def train(config):
            tune.report({"pid": os.getpid()})

        return train

    def train(config):
        report(pid=os.getpid())

    assert processes(plain()) == 2
    assert processes(DistributedTrainableCreator(train)) == 1


class StartsLate:
    """A value of a config that keeps its trial's coordinator from starting until the file is there."""

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return make_late_starter, (self._mark,)


def make_late_starter(mark: str) -> StartsLate:
    import ray

    # The driver copies it, and the ranks get it later.
    if ray.is_initialized() and str(ray.get_runtime_context().get_task_name()).endswith(".__init__"):
        ends_s = time.monotonic() + 120
        while not os.path.exists(mark) and time.monotonic() < ends_s:
            time.sleep(0.05)
    return StartsLate(mark)


def test_a_coordinator_that_starts_is_kept_when_another_trial_ends(ray_session, tmp_path):
    """Tune itself would give it the coordinator of the trial that ends, and end the one that starts."""
    import ray
    from ray import tune

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    mark = str(tmp_path / "the third trial runs")

    def train(config):
        if config["number"] == 1:
            Path(f"{mark}, and the late one too").touch()
        if config["number"] == 2:
            Path(mark).touch()
            ends_s = time.monotonic() + 120
            while not os.path.exists(f"{mark}, and the late one too") and time.monotonic() < ends_s:
                time.sleep(0.05)
        report(loss=0.0)

    analysis = tune.run(
        DistributedTrainableCreator(train, num_slots=1),
        config={
            "number": tune.grid_search([0, 1, 2, 3]),
            "late": tune.sample_from(
                lambda spec: StartsLate(mark) if spec.config.number == 1 else None,
            ),
        },
        max_concurrent_trials=2,
        storage_path=str(tmp_path),
        verbose=0,
    )
    first, late, third, _ = (trial.last_result["pid"] for trial in analysis.trials)  # the coordinators'
    assert Path(mark).exists() and first == third != late
