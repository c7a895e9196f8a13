"""A plain Tune search over all hosts: what the cluster files need to carry, without training anything."""

import argparse
import socket

import ray
from ray import tune
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

parser = argparse.ArgumentParser()
parser.add_argument("--hosts", type=int, default=1)
parser.add_argument("--storage", default=None)
options = parser.parse_args()


@ray.remote(num_cpus=1)
def host_name() -> str:
    return socket.gethostname()


def objective(config: dict) -> None:
    # Tune leaves an empty first bundle out.
    group = ray.util.get_current_placement_group()
    slots = [PlacementGroupSchedulingStrategy(group, i) for i in range(options.hosts)]
    names = ray.get([host_name.options(scheduling_strategy=slot).remote() for slot in slots])
    tune.report({"loss": (config["x"] - 1) ** 2, "hosts": " ".join(sorted(set(names)))})


ray.init(address="auto")
trainable = tune.with_resources(
    objective, tune.PlacementGroupFactory([{}] + [{"CPU": 1}] * options.hosts, strategy="STRICT_SPREAD")
)
results = tune.Tuner(
    trainable,
    param_space={"x": tune.grid_search([0.0, 1.0, 2.0])},
    tune_config=tune.TuneConfig(metric="loss", mode="min"),
    run_config=tune.RunConfig(storage_path=options.storage, verbose=0),
).fit()
best = results.get_best_result()
print(f"best_config {best.config} hosts {best.metrics['hosts']} errors {results.num_errors}")
