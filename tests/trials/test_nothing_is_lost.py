"""What a trial leaves behind at its end reaches its user: exit handlers, files of its directory."""

from __future__ import annotations

import atexit
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import eventually
from ray import tune

from horovod_tune import DistributedTrainableCreator, report

pytestmark = [pytest.mark.slow, pytest.mark.processes]


def test_a_process_that_is_ended_cleans_up_first(tune_run: Callable[..., Any], tmp_path: Path) -> None:
    """Also the ranks of a trial that failed on another one, and what only Python's own exit cleans up."""
    notes = tmp_path / "notes"
    notes.mkdir()

    def train(config: dict[str, Any]) -> None:
        import builtins

        import horovod.torch as hvd
        import torch

        hvd.init()
        end = config["end"]
        builtins.kept = tempfile.TemporaryDirectory(dir=notes)  # type: ignore[attr-defined]
        atexit.register((notes / f"{end}_{hvd.rank()}").touch)
        report(loss=0.0)
        if end == "failed":
            if hvd.rank() == 1:
                raise ValueError("diverged")
            hvd.allreduce(torch.zeros(1))
        while end == "stopped":
            report(loss=0.0)

    trainable = DistributedTrainableCreator(train, num_slots=2)
    ends = ["failed", "stopped", "returned"]
    config = {"end": tune.grid_search(ends)}
    analysis = tune_run(trainable, config=config, stop={"training_iteration": 3}, raise_on_failed_trial=False)
    iterations = {trial.config["end"]: trial.last_result["training_iteration"] for trial in analysis.trials}
    assert iterations == {"failed": 1, "stopped": 3, "returned": 1}
    expected = {f"{end}_{rank}" for end in ends for rank in (0, 1)}
    eventually(lambda: set(os.listdir(notes)) == expected, why=lambda: os.listdir(notes))


@pytest.mark.contract
def test_artifacts_are_stored_until_the_end(ray_session: Any, tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        for number in range(3):
            Path(f"picture_{number}.txt").touch()
            with tempfile.TemporaryDirectory() as directory:
                report(loss=1.0, checkpoint=directory)
            if config["asks"] and number == 1:
                stored = list(Path(tune.get_context().get_storage().trial_fs_path).glob("picture*"))
                Path("stopped.txt").touch()
                report(loss=1.0, stored=len(stored))
        Path("last.txt").touch()

    results = tune.Tuner(
        DistributedTrainableCreator(train, num_slots=1),
        param_space={"asks": tune.grid_search([True, False])},
        tune_config=tune.TuneConfig(max_concurrent_trials=1),  # so the second one reuses the actor
        run_config=tune.RunConfig(
            storage_path=str(tmp_path),
            verbose=0,
            stop=lambda trial_id, result: "stored" in result,
            sync_config=tune.SyncConfig(sync_artifacts=True, sync_artifacts_on_checkpoint=True),
        ),
    ).fit()
    stopped, finished = sorted(results, key=lambda each: len(os.listdir(each.path)))
    assert (stopped.metrics or {})["stored"] == 2  # at each checkpoint
    assert len(list(Path(stopped.path).glob("picture_*"))) == 2
    assert Path(stopped.path, "stopped.txt").exists()
    assert len(list(Path(finished.path).glob("picture_*"))) == 3
    assert Path(finished.path, "last.txt").exists()
