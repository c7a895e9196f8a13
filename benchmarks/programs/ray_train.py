"""Ray Train V2's TorchTrainer inside a Tune trial, as in its guide: the trial drives the run."""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import ray.train
import ray.train.torch
from ray import tune
from ray.tune.integration.ray_train import TuneReportCallback

from benchmarks.programs import trials

REPORTS, RANKS = trials.REPORTS, trials.RANKS  # so that a rank does not import what the driver does


def train(config: dict[str, Any]) -> None:
    import torch

    for _ in range(REPORTS):
        time.sleep(config["step_s"])
        x = torch.full((1,), config["x"])
        torch.distributed.all_reduce(x)
        ray.train.report({"x": x.item() / RANKS})


def trial(config: dict[str, Any]) -> None:
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config=config,
        torch_config=ray.train.torch.TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=trials.RANKS),
        run_config=ray.train.RunConfig(
            name=tune.get_context().get_trial_id(),
            storage_path=tempfile.mkdtemp(prefix="benchmark_"),
            callbacks=[TuneReportCallback()],
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    options = trials.arguments(__doc__, trials=2)
    trials.start_ray(num_cpus=12)  # a trial's workers are outside it, so nothing reserves them in advance
    placed = tune.with_resources(trial, {"cpu": 1})
    trials.publish(trials.search(placed, options.kind, options.trials))
