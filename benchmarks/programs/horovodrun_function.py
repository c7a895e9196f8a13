"""The same function for `horovodrun` and `torchrun`; it reports to a file."""

from __future__ import annotations

import json
import sys
import time

import torch


def train(backend: str, x: float, step_s: float, reports: int, path: str) -> None:
    if backend == "torch":
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank = dist.get_rank()
    else:
        import horovod.torch as hvd

        hvd.init()
        rank = hvd.rank()
    with open(path if rank == 0 else "/dev/null", "a") as file:
        for _ in range(reports):
            time.sleep(step_s)
            value = torch.full((1,), x)
            if backend == "torch":
                dist.all_reduce(value)
                value /= dist.get_world_size()
            else:
                value = hvd.allreduce(value, name="x")
            file.write(json.dumps({"x": value.item(), "time": time.time()}) + "\n")
    if backend == "torch":
        dist.destroy_process_group()  # at exit, its threads would abort the process now and then


if __name__ == "__main__":
    train(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
