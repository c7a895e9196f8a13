"""A search over all hosts that needs a module and data from its folder, and ends when it is told to."""

import argparse
import os
import socket
import sys
import time

import helper
import ray
from ray import tune

parser = argparse.ArgumentParser()
parser.add_argument("--storage")
parser.add_argument("--until", help="a file; the script ends when it is there")
parser.add_argument("--exit-code", type=int, default=0)
options = parser.parse_args()


def objective(config):
    import helper  # on the trial's own host

    host = socket.gethostname()
    tune.report({"loss": config["x"], "host": host, "said": helper.MESSAGE})


ray.init(address="auto", log_to_driver=False)
print("starts with:", helper.MESSAGE, flush=True)
results = tune.Tuner(
    tune.with_resources(objective, tune.PlacementGroupFactory([{"CPU": 2}])),
    param_space={"x": tune.grid_search([1, 2, 3, 4])},
    run_config=tune.RunConfig(name="launched", storage_path=options.storage, verbose=0),
).fit()
said = {result.metrics.get("said") for result in results}
print("searched:", said, "errors", results.num_errors, flush=True)
end, ticks = time.monotonic() + 500, 0
while options.until and not os.path.exists(options.until) and time.monotonic() < end:
    time.sleep(1)
    ticks += 1
    print("tick", ticks, flush=True)
print("script ends", flush=True)
sys.exit(options.exit_code)
