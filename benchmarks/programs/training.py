"""Steps a second of the same training function and the same threads, under `horovodrun` and in a trial."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.programs import trials

WARM_UP = 20


def steps_per_second(steps: int) -> float:
    """Train a small convolutional network on random images, 2 ranks, one thread each."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 24 * 24, 10),
    )
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    images, labels = torch.randn(32, 1, 28, 28), torch.randint(10, (32,))
    started = 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            started = time.monotonic()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return steps / (time.monotonic() - started)


def by_horovodrun(steps: int, variables: Mapping[str, str] = MappingProxyType({})) -> float:
    with tempfile.NamedTemporaryFile("r") as file:
        horovodrun = [sys.executable, str(Path(sys.executable).with_name("horovodrun")), "--gloo", "-np", "2"]
        function = [sys.executable, "-m", "benchmarks.programs.training", "rank", str(steps), file.name]
        environment = {**os.environ, **variables, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        subprocess.run([*horovodrun, *function], check=True, env=environment, stdout=subprocess.DEVNULL)
        return float(file.read())


def train(config: dict[str, Any]) -> None:
    from horovod_tune import report

    report(x=steps_per_second(config["steps"]))


def by_a_trial(steps: int) -> float:
    from ray import tune

    from horovod_tune import DistributedTrainableCreator

    trials.start_ray(num_cpus=4)
    trainable = DistributedTrainableCreator(train, num_slots=trials.RANKS)
    with tempfile.TemporaryDirectory() as storage:
        analysis = tune.run(trainable, config={"steps": steps}, storage_path=storage, verbose=0)
        return analysis.trials[0].last_result["x"]


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        speed = steps_per_second(int(sys.argv[2]))
        if os.environ["HOROVOD_RANK"] == "0":
            Path(sys.argv[3]).write_text(str(speed))
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=["horovodrun", "horovodrun_allocator", "ours"])
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    if options.way == "ours":
        speed = by_a_trial(options.steps)
    elif options.way == "horovodrun":
        speed = by_horovodrun(options.steps)
    else:
        from horovod_tune.rank.allocator import SETTINGS

        speed = by_horovodrun(options.steps, {name: str(value) for name, value in SETTINGS.items()})
    trials.publish({"steps_per_s": speed})
