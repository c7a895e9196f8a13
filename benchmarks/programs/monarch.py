"""PyTorch's Monarch, whose actors know no search: two processes that train three DDP steps.

Needs `pip install torchmonarch==0.7`. The clock starts when the processes are requested.
"""

from __future__ import annotations

import itertools
import os
import socket
import statistics
import time

import torch
import torch.distributed as dist
from monarch.actor import Actor, current_rank, endpoint, this_host

from benchmarks.programs import trials


class Trainer(Actor):
    @endpoint
    def train(self, port: int) -> None:
        if not dist.is_initialized():
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(trials.RANKS))
            os.environ["RANK"] = str(current_rank().rank)
            dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(trials.REPORTS):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()


if __name__ == "__main__":
    times = [time.monotonic()]
    processes = this_host().spawn_procs(per_host={"gpus": trials.RANKS})
    trainers = processes.spawn("trainers", Trainer)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for _ in range(21):
        trainers.train.call(port).get()
        times.append(time.monotonic())
    first, *later = (after - before for before, after in itertools.pairwise(times))
    trials.publish({"first_trial_s": first, "trial_s": statistics.median(later)})
