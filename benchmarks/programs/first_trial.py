"""How long until a function that is started for the first time makes its last report.

The clock starts when `horovodrun` is launched, or when `tune.run` is called while Ray runs. The driver has
torch and Horovod imported by then, as a script with a Horovod function at hand has.
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
    import horovod.torch as hvd
    import torch

    from horovod_tune import report

    hvd.init()
    for _ in range(REPORTS):
        x = hvd.allreduce(torch.full((1,), config["x"]), name="x")
        report(x=x, time=time.time())


def by_horovodrun() -> float:
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as file:
        started = time.time()
        launch(0.5, 0.0, trials.REPORTS, file.name)
        return json.loads(file.readlines()[-1])["time"] - started


def by_a_trial() -> float:
    import horovod.torch  # noqa: F401
    from ray import tune

    from horovod_tune import DistributedTrainableCreator

    trials.start_ray(num_cpus=4)
    time.sleep(5)  # until Ray has started the processes that it keeps ready
    trainable = DistributedTrainableCreator(train, num_slots=trials.RANKS)
    with tempfile.TemporaryDirectory() as storage:
        started = time.time()
        analysis = tune.run(trainable, config={"x": 0.5}, storage_path=storage, verbose=0)
        return analysis.trials[0].last_result["time"] - started


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=["horovodrun", "ours"])
    seconds = by_horovodrun() if parser.parse_args().way == "horovodrun" else by_a_trial()
    trials.publish({"first_trial_s": seconds})
