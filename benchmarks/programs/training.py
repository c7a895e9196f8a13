"""Steps per second of one training function, with the same threads, under a launcher and in a trial."""

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
from benchmarks.programs.horovodrun_trial import launcher

WARM_UP = 20


def steps_per_second(steps: int, backend: str) -> float:
    """Train a small convolutional network on random images, 2 ranks, one thread each."""
    import torch

    if backend == "torch":
        torch.distributed.init_process_group("gloo")
    else:
        import horovod.torch as hvd

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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if backend == "torch":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        optimizer = hvd.DistributedOptimizer(optimizer)
    images, labels = torch.randn(32, 1, 28, 28), torch.randint(10, (32,))
    started = 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            started = time.monotonic()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return steps / (time.monotonic() - started)


def by_launcher(backend: str, steps: int, variables: Mapping[str, str] = MappingProxyType({})) -> float:
    with tempfile.NamedTemporaryFile("r") as file:
        module = ["-m", "benchmarks.programs.training", "rank", str(steps), file.name, backend]
        environment = {**os.environ, **variables, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        command = launcher(backend, 2) + module
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        return float(file.read())


def train(config: dict[str, Any]) -> None:
    from horovod_tune import report

    report(x=steps_per_second(config["steps"], config["backend"]))


def by_a_trial(backend: str, steps: int) -> float:
    from ray import tune

    from horovod_tune import DistributedTrainableCreator

    trials.start_ray(num_cpus=4)
    trainable = DistributedTrainableCreator(train, backend=backend, num_slots=trials.RANKS)
    config = {"steps": steps, "backend": backend}
    with tempfile.TemporaryDirectory() as storage:
        analysis = tune.run(trainable, config=config, storage_path=storage, verbose=0)
        return analysis.trials[0].last_result["x"]


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        speed = steps_per_second(int(sys.argv[2]), sys.argv[4])
        if "0" in (os.environ.get("HOROVOD_RANK"), os.environ.get("RANK")):
            Path(sys.argv[3]).write_text(str(speed))
        if sys.argv[4] == "torch":
            # At exit, its threads would abort the process now and then. Not before the model has gone: its
            # end can then wait forever for a thread that needs Python's lock (torch 2.13).
            import torch

            torch.distributed.destroy_process_group()
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "way", choices=["horovodrun", "horovodrun_allocator", "ours", "torchrun", "ours_torch"]
    )
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    if options.way.startswith("ours"):
        speed = by_a_trial("torch" if options.way == "ours_torch" else "horovod", options.steps)
    elif options.way != "horovodrun_allocator":
        speed = by_launcher("torch" if options.way == "torchrun" else "horovod", options.steps)
    else:
        from horovod_tune.rank.allocator import SETTINGS

        speed = by_launcher(
            "horovod", options.steps, {name: str(size) for name, (_, size) in SETTINGS.items()}
        )
    trials.publish({"steps_per_s": speed})
