"""What Ray's own functions do in a rank: the same as in a plain Tune function, once per trial."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train
from ray import tune

from horovod_tune import DistributedTrainableCreator, report

pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture
def file_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return f"file://{tmp_path}/mlruns"


def runs_in(store: str) -> list[tuple[str, str, str, dict[str, float]]]:
    from mlflow import MlflowClient

    client = MlflowClient(store)
    experiments = [each for each in client.search_experiments() if each.name != "Default"]
    return [
        (experiment.name, run.info.run_name, run.info.status, run.data.metrics)
        for experiment in experiments
        for run in client.search_runs([experiment.experiment_id])
    ]


def test_rays_functions_work_in_ranks(tune_run: Callable[..., Any], file_store: str) -> None:
    @ray.remote
    def square(x: int) -> int:
        return x * x

    def train(config: dict[str, Any]) -> None:
        import os

        import horovod.torch as hvd

        hvd.init()

        def outcome(call: Callable[[], Any]) -> str:
            try:
                return str(call())
            except Exception as error:
                return f"{type(error).__name__}: {error}"

        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
        from ray.air.integrations.mlflow import setup_mlflow

        mlflow = setup_mlflow(config, tracking_uri=file_store, create_experiment_if_not_exists=True)
        mlflow.log_metric("loss", 0.5)
        seen = {
            "before": ray.is_initialized(),
            "task": outcome(lambda: ray.get(square.remote(3))),
            "free": outcome(lambda: ray.get(square.options(num_cpus=0).remote(3))),
            "waits": outcome(lambda: ray.wait([square.options(num_cpus=4).remote(3)], timeout=0.1)[0]),
            "again": outcome(lambda: ray.wait([square.options(num_cpus=4).remote(3)], timeout=0.1)[0]),
            "nodes": outcome(lambda: len(ray.nodes())),
            "train.report": outcome(lambda: ray.train.report({"loss": 1.0})),
            "storage": outcome(lambda: tune.get_context().get_storage().experiment_fs_path),
            "rank": outcome(lambda: tune.get_context().get_world_rank()),
        }
        report(loss=0.0, seen=hvd.allgather_object(seen))

    (trial,) = tune_run(DistributedTrainableCreator(train, num_slots=2)).trials
    for rank, seen in enumerate(trial.last_result["seen"]):
        assert not seen["before"], "a function that does not use Ray is not connected"
        assert (seen["task"], seen["free"], seen["waits"], seen["again"]) == ("9", "9", "[]", "[]")
        assert seen["nodes"] == "1"
        log = Path(trial.path, f"rank_{rank}.log").read_text()  # each rank warns once
        assert log.count("the task square needs {'CPU': 4}, which is not free now") == 1
        assert "Please use the equivalent `ray.tune` API" in seen["train.report"]
        assert seen["storage"] == str(Path(trial.path).parent)
        assert seen["rank"] == str(rank)
    name = str(trial)
    assert runs_in(file_store) == [(name, name, "FINISHED", {"loss": 0.5})]


def test_trackers_have_one_run_per_trial(
    ray_session: Any, tmp_path: Path, file_store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lines of docs/integrations.md: a callback of the driver's, and what a rank sets up itself."""
    pytest.importorskip("wandb")
    from ray.air.integrations.mlflow import MLflowLoggerCallback
    from ray.air.integrations.wandb import WandbLoggerCallback

    by_callback, by_rank = tmp_path / "callback", tmp_path / "rank"
    by_callback.mkdir()
    by_rank.mkdir()
    monkeypatch.setenv("WANDB_MODE", "offline")

    def train(config: dict[str, Any]) -> None:
        import os

        from ray.air.integrations.wandb import setup_wandb

        os.environ["WANDB_MODE"] = "offline"
        run = setup_wandb(config, project="mine", dir=str(by_rank))
        for step in range(3):
            run.log({"gradient_norm": config["x"] + step})
            report(loss=config["x"] / (step + 1))

    callbacks = [
        MLflowLoggerCallback(tracking_uri=file_store, experiment_name="mine"),
        WandbLoggerCallback(project="mine", mode="offline", dir=str(by_callback)),
    ]
    results = tune.Tuner(
        DistributedTrainableCreator(train, num_slots=2),
        param_space={"x": tune.grid_search([3.0, 6.0])},
        run_config=tune.RunConfig(storage_path=str(tmp_path / "results"), verbose=0, callbacks=callbacks),
    ).fit()
    assert not results.errors
    seen = sorted((name, metrics["loss"]) for name, _, _, metrics in runs_in(file_store))
    assert seen == [("mine", 1.0), ("mine", 2.0)]
    assert all(list(Path(each.path).glob("events.out.tfevents.*")) for each in results)
    for directory in (by_callback, by_rank):
        sizes = [each.stat().st_size for each in directory.glob("**/offline-run-*/run-*.wandb")]
        assert len(sizes) == 2 and min(sizes) > 1000, "each has its reports"
