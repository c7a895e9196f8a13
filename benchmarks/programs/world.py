"""Seconds that `hvd.init()` takes for N ranks on this machine, from its last call to its last return.

Under `horovodrun`, in a first trial, and in a second one, whose ranks are new processes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.programs import trials


def timed_init(folder: str) -> None:
    import horovod.torch as hvd
    import torch

    torch.set_num_threads(1)
    called = time.monotonic()
    hvd.init()
    done = time.monotonic()
    hvd.allreduce(torch.ones(1))
    Path(folder, str(hvd.rank())).write_text(f"{called} {done}")


def seconds_of(folder: str, size: int) -> float:
    times = [tuple(map(float, Path(folder, str(rank)).read_text().split())) for rank in range(size)]
    return max(done for _, done in times) - max(called for called, _ in times)


def by_horovodrun(size: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        horovodrun = [sys.executable, str(Path(sys.executable).with_name("horovodrun")), "--gloo"]
        function = [sys.executable, "-m", "benchmarks.programs.world", "rank", folder]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
        subprocess.run(
            [*horovodrun, "-np", str(size), "-H", f"localhost:{size}", *function],
            check=True,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        return {"init_s": seconds_of(folder, size)}


def train(config: dict[str, Any]) -> None:
    from horovod_tune import report

    timed_init(config["folder"])
    report(x=1)


def by_trials(size: int) -> dict[str, float]:
    from ray import tune

    from horovod_tune import DistributedTrainableCreator

    trials.start_ray(num_cpus=size)
    trainable = DistributedTrainableCreator(train, num_slots=size, timeout_s=120)
    with tempfile.TemporaryDirectory() as storage:
        folders = [tempfile.mkdtemp(dir=storage) for _ in range(2)]
        config = {"folder": tune.grid_search(folders)}
        tune.run(trainable, config=config, storage_path=storage, max_concurrent_trials=1, verbose=0)
        first, second = (seconds_of(folder, size) for folder in folders)
    return {"init_s": first, "second_init_s": second}


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        timed_init(sys.argv[2])
        sys.exit()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=["horovodrun", "ours"])
    parser.add_argument("size", type=int)
    options = parser.parse_args()
    trials.publish((by_horovodrun if options.way == "horovodrun" else by_trials)(options.size))
