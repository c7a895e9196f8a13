"""Seconds until the last report of a function that is started for the first time.

The clock starts when `horovodrun` or `torchrun` is launched, or when `tune.run` is called while Ray runs. The
driver has already imported torch and Horovod, as has a script that defines a Horovod function.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from typing import Any

from benchmarks.programs import trials
from benchmarks.programs.horovodrun_trial import launch

REPORTS = trials.REPORTS  # so that a rank does not import what the driver does


def train(config: dict[str, Any]) -> None:
    import torch

    from horovod_tune import report

    if config["backend"] == "horovod":
        import horovod.torch as hvd

        hvd.init()
    for _ in range(REPORTS):
        x = torch.full((1,), config["x"])
        if config["backend"] == "horovod":
            x = hvd.allreduce(x, name="x")
        else:
            torch.distributed.all_reduce(x)
        report(x=x, time=time.time())


def by_launcher(backend: str) -> float:
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as file:
        started = time.time()
        launch(0.5, 0.0, trials.REPORTS, file.name, backend)
        return json.loads(file.readlines()[-1])["time"] - started


def by_a_trial(backend: str) -> float:
    import horovod.torch  # noqa: F401
    from ray import tune

    from horovod_tune import DistributedTrainableCreator

    trials.start_ray(num_cpus=4)
    time.sleep(5)  # until Ray has started the processes that it keeps ready
    trainable = DistributedTrainableCreator(train, backend=backend, num_slots=trials.RANKS)
    config = {"x": 0.5, "backend": backend}
    with tempfile.TemporaryDirectory() as storage:
        started = time.time()
        analysis = tune.run(trainable, config=config, storage_path=storage, verbose=0)
        return analysis.trials[0].last_result["time"] - started


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=["horovodrun", "ours", "torchrun", "ours_torch"])
    way = parser.parse_args().way
    backend = "torch" if way in ("torchrun", "ours_torch") else "horovod"
    seconds = by_a_trial(backend) if way.startswith("ours") else by_launcher(backend)
    trials.publish({"first_trial_s": seconds})
