"""The old factory's way: a `horovod.ray.RayExecutor` for every trial."""

from __future__ import annotations

import time
from typing import Any

from horovod.ray import RayExecutor
from ray import tune

from benchmarks.programs import trials

REPORTS = trials.REPORTS  # so that a rank does not import what the driver does


def train(config: dict[str, Any]) -> list[float]:
    import horovod.torch as hvd
    import torch

    hvd.init()
    reported = []
    for _ in range(REPORTS):
        time.sleep(config["step_s"])
        reported.append(hvd.allreduce(torch.full((1,), config["x"]), name="x").item())
    return reported


def trial(config: dict[str, Any]) -> None:
    # The old trainable stepped all ranks once per report; collecting the reports at the end costs less.
    settings = RayExecutor.create_settings(timeout_s=60)
    executor = RayExecutor(settings, num_workers=trials.RANKS, cpus_per_worker=1)
    executor.start()
    for x in executor.run(train, args=[config])[0]:
        tune.report({"x": x})
    executor.shutdown()


if __name__ == "__main__":
    options = trials.arguments(__doc__, trials=3)
    trials.start_ray()
    bundles = [{"CPU": 0.01}, *[{"CPU": 1}] * trials.RANKS]
    placed = tune.with_resources(trial, tune.PlacementGroupFactory(bundles))
    trials.publish(trials.search(placed, options.kind, options.trials))
