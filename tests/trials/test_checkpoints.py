"""Checkpoints of real 2-rank trials: stored, restored on every rank, exploited by PBT."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from counting import train
from processes import error_of, results_of

from horovod_tune import DistributedTrainableCreator

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ray_session")]


def step_of(checkpoint):
    return json.loads(Path(checkpoint, "sub", "state").read_text())["step"]


@pytest.mark.contract
def test_a_killed_rank_starts_again_from_the_last_checkpoint_on_every_rank(tune_run, tmp_path):
    analysis = tune_run(
        DistributedTrainableCreator(train, num_slots=2),
        config={"steps": 5, "die_at": 3, "once": str(tmp_path / "died")},
        max_failures=1,
        metric="value",
        mode="max",
    )
    (trial,) = analysis.trials
    results = results_of(trial)
    folders = [f"checkpoint_{number:06d}" for number in range(5)]
    assert [result["checkpoint_dir_name"] for result in results] == folders
    assert sorted(each.name for each in Path(trial.path).glob("checkpoint_*")) == folders
    assert step_of(analysis.best_checkpoint.path) == 5
    assert [result["step"] for result in results] == [1, 2, 3, 4, 5]
    assert [result["training_iteration"] for result in results] == [1, 2, 3, 4, 5]
    assert results[-1]["starts"] == [3, 3]
    error = error_of(trial)
    assert "rank 1 of 2 on" in error and "died" in error


@pytest.mark.contract
def test_population_based_training_hands_the_donors_checkpoint_to_every_rank(tune_run):
    from ray import tune
    from ray.tune.schedulers import PopulationBasedTraining

    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        hyperparam_mutations={"gain": [1, 10]},
        quantile_fraction=0.5,
        resample_probability=0.0,
        synch=True,
    )
    analysis = tune_run(
        DistributedTrainableCreator(train, num_slots=2),
        config={
            "steps": 8,
            "gain": tune.grid_search([1, 10]),
            "name": tune.sample_from(lambda spec: f"gain-{spec.config.gain}"),
        },
        metric="value",
        mode="max",
        scheduler=scheduler,
    )
    exploited = [result for trial in analysis.trials for result in results_of(trial) if result["starts"][0]]
    assert exploited, "no trial was exploited"
    for result in exploited:
        assert result["starts"][0] == result["starts"][1]
    origins = {result["origin"] for result in exploited}
    assert "gain-10" in origins
    assert all(trial.status == "TERMINATED" for trial in analysis.trials)
    # With one trial left to run, Tune itself would end the actor of the trial that pauses.
    assert len({result["pid"] for trial in analysis.trials for result in results_of(trial)}) <= 2


@pytest.mark.slow
def test_remote_storage_gets_checkpoints_and_logs(ray_session, tmp_path):
    """A storage that is not a local path, as a cloud URI: pyarrow's own in-process file system."""
    import pyarrow.fs
    from ray import tune

    root = tmp_path / "bucket"
    root.mkdir()
    # SubTreeFileSystem is not "local" to Tune and to us, so files go through pyarrow as for a bucket.
    storage = pyarrow.fs.SubTreeFileSystem(str(root), pyarrow.fs.LocalFileSystem())
    tuner = tune.Tuner(
        DistributedTrainableCreator(train, num_slots=2),
        param_space={"steps": 2},
        run_config=tune.RunConfig(
            storage_filesystem=storage, storage_path="results", name="remote", verbose=0
        ),
    )
    (result,) = tuner.fit()
    folder = root / result.path
    assert step_of(folder / "checkpoint_000001") == 2
    assert (folder / "rank_1.log").read_text() == "step 1\nstep 2\n"
