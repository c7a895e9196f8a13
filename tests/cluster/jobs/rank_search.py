"""A search of Horovod trials with one rank on each of so many hosts; stays until it is told to go."""

import argparse
import os
import socket
import time

import ray
from ray import tune

from horovod_tune import DistributedTrainableCreator, report

parser = argparse.ArgumentParser()
parser.add_argument("--hosts", type=int, default=1)
parser.add_argument("--until", help="a file; the script ends when it is there")
options = parser.parse_args()


def train(config):
    import horovod.torch as hvd

    hvd.init()
    hosts = " ".join(sorted(hvd.allgather_object(socket.gethostname())))
    report({"loss": (config["x"] - 1) ** 2, "hosts": hosts})


ray.init(address="auto")
results = tune.Tuner(
    DistributedTrainableCreator(train, num_hosts=options.hosts),
    param_space={"x": tune.grid_search([0.0, 1.0, 2.0])},
    tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=1),
    run_config=tune.RunConfig(verbose=0),
).fit()
best = results.get_best_result()
print(f"best_config {best.config} hosts {best.metrics['hosts']} errors {results.num_errors}", flush=True)
end = time.monotonic() + 300
while options.until and not os.path.exists(options.until) and time.monotonic() < end:
    time.sleep(0.5)
