"""Ours: a function of 2 ranks, with Horovod or with torch.distributed."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.programs import trials

REPORTS = trials.REPORTS  # so that a rank does not import what the driver does


def train(config: dict[str, Any]) -> None:
    import horovod.torch as hvd
    import torch

    from horovod_tune import report

    hvd.init()
    for _ in range(REPORTS):
        time.sleep(config["step_s"])
        x = hvd.allreduce(torch.full((1,), config["x"]), name="x")
        report(x=x)


def train_with_torch(config: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    from horovod_tune import report

    for _ in range(REPORTS):
        time.sleep(config["step_s"])
        x = torch.full((1,), config["x"])
        dist.all_reduce(x)
        report(x=x / dist.get_world_size())


FUNCTIONS = {"horovod": train, "torch": train_with_torch}

if __name__ == "__main__":
    from horovod_tune import DistributedTrainableCreator

    options = trials.arguments(__doc__, trials=40, backends=tuple(FUNCTIONS))
    trials.start_ray()
    trainable = DistributedTrainableCreator(
        FUNCTIONS[options.backend], backend=options.backend, num_slots=trials.RANKS
    )
    trials.publish(trials.search(trainable, options.kind, options.trials))
