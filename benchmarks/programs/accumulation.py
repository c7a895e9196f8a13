"""What 500 trials leave behind: in the processes that outlive a trial, as ranks, and in shared memory."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from typing import Any

import numpy as np
import psutil
from ray import tune

from benchmarks.programs import trials
from benchmarks.programs.trials import processes_of_trials

# The number of trials after which nothing may grow any more.
SETTLED = 20
WHAT = ("memory_mb", "threads", "files", "ports", "ranks", "shared_memory_mb")


def train(config: dict[str, Any]) -> None:
    import horovod.torch as hvd
    import torch

    from horovod_tune import report

    hvd.init()
    model = torch.nn.Linear(64, 64)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().sum().backward()
        optimizer.step()
        report(x=1.0)


class Watch(tune.Callback):
    """Measures the trials' processes after every trial."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []
        # Of processes that outlive a trial.
        self.pids: set[int] = set()

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
        row = [0.0] * len(WHAT)
        for kind, process in processes_of_trials():
            if kind == "rank":  # of this trial, or forked for the next one
                row[4] += 1
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                ports = [each for each in process.net_connections() if each.status == psutil.CONN_LISTEN]
                row[0] += process.memory_info().rss / 1e6
                row[1] += process.num_threads()
                row[2] += process.num_fds()
                row[3] += len(ports)
                self.pids.add(process.pid)
        row[5] = psutil.disk_usage("/dev/shm").used / 1e6
        self.rows.append(row)


if __name__ == "__main__":
    from horovod_tune import DistributedTrainableCreator

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=500)
    options = parser.parse_args()
    trials.start_ray(num_cpus=2)
    watch = Watch()
    with tempfile.TemporaryDirectory() as storage:
        tune.run(
            DistributedTrainableCreator(train, num_slots=trials.RANKS),
            num_samples=options.trials,
            max_concurrent_trials=1,
            storage_path=storage,
            callbacks=[watch],
            verbose=0,
        )
    rows = np.array(watch.rows)
    numbers = np.arange(len(rows))
    figures = {"processes": len(watch.pids)}
    for column, what in enumerate(WHAT):
        settled = rows[SETTLED:, column]
        slope = float(np.polyfit(numbers[SETTLED:], settled, 1)[0])
        figures |= {f"{what}_after_20": float(settled[0]), f"{what}_at_end": float(settled[-1])}
        figures[f"{what}_per_100_trials"] = slope * 100
    trials.publish(figures)
