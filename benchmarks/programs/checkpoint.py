"""A checkpoint of 1 GB from rank 0 to local storage, against a plain copy; and the memory that it takes."""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from ray import tune

from benchmarks.programs import trials


def write(folder: str, megabytes: int) -> None:
    """Write random bytes, which cannot be compressed or left as a hole, a few MB at a time."""
    block = os.urandom(4 << 20)
    with Path(folder, "weights").open("wb") as file:
        for _ in range(megabytes // 4):
            file.write(block)


def peak_megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def train(config: dict[str, Any]) -> None:
    import horovod.torch as hvd
    import torch

    from horovod_tune import report

    hvd.init()
    report(copy_s=0.0, save_s=0.0, grown=0.0)  # so that what only a first report costs is not measured
    folder = tempfile.mkdtemp(dir=config["storage"])
    if hvd.rank() == 0:
        write(folder, config["megabytes"])
    times = []
    for _ in range(config["rounds"]):  # alternately, since a disk's speed varies
        started = time.monotonic()
        if hvd.rank() == 0:
            copy = tempfile.mkdtemp(dir=config["storage"])
            shutil.copytree(folder, copy, dirs_exist_ok=True)
            copied = time.monotonic()
            shutil.rmtree(copy)
            times.append(copied - started)
        hvd.allreduce(torch.ones(1))
        before, started = peak_megabytes(), time.monotonic()
        report(copy_s=0.0, save_s=0.0, grown=0.0, checkpoint=folder if hvd.rank() == 0 else None)
        if hvd.rank() == 0:
            times.append(time.monotonic() - started)
        grown = hvd.allreduce(torch.tensor([peak_megabytes() - before]), op=hvd.Max).item()
    if hvd.rank() == 0:
        shutil.rmtree(folder)
        copies, saves = sorted(times[::2]), sorted(times[1::2])
        middle = len(copies) // 2
        report(copy_s=copies[middle], save_s=saves[middle], grown=grown)


if __name__ == "__main__":
    from horovod_tune import DistributedTrainableCreator

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    trials.start_ray(num_cpus=4)
    trainable = DistributedTrainableCreator(train, num_slots=trials.RANKS)
    with tempfile.TemporaryDirectory() as storage:
        config = {"storage": storage, "megabytes": options.megabytes, "rounds": options.rounds}
        keep_one = tune.CheckpointConfig(num_to_keep=1)
        analysis = tune.run(
            trainable, config=config, storage_path=storage, checkpoint_config=keep_one, verbose=0
        )
        result = analysis.trials[0].last_result
    trials.publish(
        {
            "copy_s": result["copy_s"],
            "save_s": result["save_s"],
            "save_to_copy": result["save_s"] / result["copy_s"],
            "grown_mb": result["grown"],
        }
    )
