"""The first example of Horovod's guide to Ray Tune, as printed there, apart from its first lines.

`use_gpu` and `Model`, which the guide does not define, are at the top. We also added the parser, `ray.init`,
and the metric and mode of `tune.run`, which `best_config` requires.

    python examples/horovod_simple.py
"""

import argparse
import time
from typing import Dict

import horovod.torch as hvd
import ray
import torch
from ray import tune

from horovod_tune import DistributedTrainableCreator

use_gpu = torch.cuda.device_count() >= 2


class Model:
    def __init__(self, learning_rate):
        self.weights = torch.zeros(2)
        self.learning_rate = learning_rate


def training_function(config: Dict):  # noqa: UP006 - as printed
    hvd.init()
    for i in range(config["epochs"]):  # noqa: B007
        time.sleep(1)
        model = Model(learning_rate=config["lr"])  # noqa: F841
        tune.report(test=1, rank=hvd.rank())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", default="local")  # local: starts Ray; auto: this machine's cluster
    ray.init(parser.parse_args().address)
    trainable = DistributedTrainableCreator(
            training_function, num_slots=2, use_gpu=use_gpu)
    analysis = tune.run(
        trainable,
        num_samples=2,
        config={
            "epochs": tune.grid_search([1, 2, 3]),
            "lr": tune.grid_search([0.1, 0.2, 0.3]),
        },
        metric="test",
        mode="max",
    )
    print(analysis.best_config)
