"""A driver that runs a search per ``preload=``; its module path has a folder of installed modules."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
from ray import tune

from horovod_tune import DistributedTrainableCreator, report


def train(config: dict[str, Any]) -> None:
    import importlib
    import sys

    was_loaded = config["imports"] in sys.modules
    importlib.import_module(config["imports"])
    # The arguments of a Python program: "rank" for one that was not forked.
    program = Path("/proc/self/cmdline").read_bytes().split(b"\0")[-2].decode()
    report(was_loaded=was_loaded, program=program)


def search(name: str, preload: list[str], imports: str, trials: int) -> None:
    print(f"search {name}", flush=True)
    analysis = tune.run(
        DistributedTrainableCreator(train, num_slots=1, backend="torch", preload=preload),
        name=name,
        num_samples=trials,
        config={"imports": imports},
        storage_path=sys.argv[1],
        verbose=0,
        raise_on_failed_trial=False,
        time_budget_s=60,
    )
    for trial in analysis.trials:
        seen = [trial.last_result.get(each) for each in ("was_loaded", "program")]
        print(f"{name}: {trial.status} {seen}", flush=True)


if __name__ == "__main__":
    ray.init("local", num_cpus=2, include_dashboard=False)
    search("missing", ["json", "no_such_module"], "json", 1)
    search("threads", ["starts_a_thread"], "json", 1)
    search("not_preloaded", [], "slow_module", 4)
    search("preloaded", ["slow_module"], "slow_module", 2)
    ray.shutdown()
