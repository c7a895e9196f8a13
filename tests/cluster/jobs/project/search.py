"""A search of Horovod trials, one rank per host, that needs a module and data from its folder.

It ends when the file `--until` exists.
"""

import argparse
import os
import socket
import sys
import time

import helper
import ray
from ray import tune

from horovod_tune import DistributedTrainableCreator, report

parser = argparse.ArgumentParser()
parser.add_argument("--address", default="local")
parser.add_argument("--hosts", type=int, default=3)
parser.add_argument("--until", help="a file; the script ends when it is there")
options = parser.parse_args()


def train(config):
    import helper  # on the rank's own host
    import horovod.torch as hvd

    hvd.init()
    found = hvd.allgather_object((socket.gethostname(), helper.MESSAGE))
    report({"loss": (config["x"] - 1) ** 2, "found": sorted(found)})


ray.init(options.address)
print("starts with:", helper.MESSAGE, flush=True)
results = tune.Tuner(
    DistributedTrainableCreator(train, num_hosts=options.hosts),
    param_space={"x": tune.grid_search([0.0, 1.0, 2.0])},
    tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=1),
    run_config=tune.RunConfig(name="project", verbose=0),
).fit()
best = results.get_best_result()
print("best", best.config, "found", best.metrics["found"], "errors", results.num_errors, flush=True)
end, ticks = time.monotonic() + 300, 0
while options.until and not os.path.exists(options.until) and time.monotonic() < end:
    time.sleep(1)
    ticks += 1
    print("tick", ticks, flush=True)
sys.exit(3)
