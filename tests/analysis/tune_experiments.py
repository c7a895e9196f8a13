"""Runs small Tune experiments of every kind: `python tune_experiments.py FOLDER NAME…`.

It has its own process, so that a driver can be killed, and no part of Ray stays in the tests' process.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining

from horovod_tune.run_settings import ExperimentMetadata, search_metadata

SPACE = {
    "lr": tune.loguniform(1e-4, 1e-1),
    "net": {"act": tune.choice(["relu", "tanh"]), "width": tune.randint(8, 64)},
    "batch": tune.choice([16, 32]),
    "constant": "always",
    "pair": [1, tune.uniform(0, 1)],
}


def train(config: dict[str, Any]) -> None:
    noise = random.Random(repr(config["lr"]))
    for step in range(config.get("epochs", 4)):
        time.sleep(0.02)
        loss = abs(math.log10(config["lr"]) + 2.3) + math.exp(-step) + noise.random() * 0.01
        if config.get("fails") and step == 2:
            raise RuntimeError("the <script>alert(1)</script> of " + str(config["fails"]))
        if config.get("diverges") and step >= 2:
            loss = float("nan")
        tune.report({"loss": loss, "accuracy": 1 / (1 + loss), "deep": {"loss": 2 * loss}, "word": "a"})


class Distributed(tune.Trainable):
    """Imitates a distributed trial: what its reports contain besides the metrics."""

    def setup(self, config: dict[str, Any]) -> None:
        self.steps = 0

    def step(self) -> dict[str, Any]:
        time.sleep(0.06)
        self.steps += 1
        loss = abs(math.log10(self.config["lr"]) + 2.3) + math.exp(-self.steps)
        told = {"world_size": 2, "hosts": "one:2", "start_s": 0.02}
        return {"loss": loss, "done": self.steps >= 6, **told}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        (Path(checkpoint_dir) / "steps").write_text(str(self.steps))

    def load_checkpoint(self, checkpoint: str) -> None:
        self.steps = int((Path(checkpoint) / "steps").read_text())

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self.steps, self.config = 0, new_config
        return True

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory([{}, {"CPU": 2}], strategy="PACK")


class KillDriver(tune.Callback):
    def on_trial_result(
        self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if result["training_iteration"] == 3 and any(other.status == "TERMINATED" for other in trials):
            ray.shutdown()  # no process of this session may outlive the test
            os.kill(os.getpid(), signal.SIGKILL)


def plans() -> dict[str, tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]]:
    """Each trainable, its space, and what its TuneConfig and RunConfig are given besides the usual."""
    lr = {"lr": SPACE["lr"]}
    asha = ASHAScheduler(grace_period=1, max_t=9, reduction_factor=3)
    pbt = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=2,
        hyperparam_mutations=lr,
        quantile_fraction=0.5,
        synch=True,  # otherwise one trial may end on a busy machine before the other can learn from it
    )
    fails = SPACE | {"fails": tune.grid_search([0, "<script>"])}
    diverges = SPACE | {"diverges": tune.grid_search([1, 0])}
    again = tune.FailureConfig(max_failures=1)
    keep = tune.CheckpointConfig(checkpoint_frequency=2, checkpoint_at_end=True, num_to_keep=2)
    return {
        "random": (train, SPACE, {"num_samples": 4}, {}),
        "asha": (train, SPACE | {"epochs": 9}, {"num_samples": 9, "scheduler": asha}, {}),
        "failing": (train, fails, {}, {"failure_config": again}),
        "diverging": (train, diverges, {"metric": "accuracy", "mode": "max"}, {}),
        "distributed": (Distributed, lr, {"num_samples": 3}, {"checkpoint_config": keep}),
        "pbt": (Distributed, lr, {"num_samples": 2, "scheduler": pbt}, {}),
        "no_metric": (train, SPACE, {"metric": None, "mode": None}, {}),
        "killed": (train, SPACE, {"num_samples": 5}, {"callbacks": [KillDriver()]}),
    }


def shifted(config: dict[str, Any]) -> None:
    tune.report({"loss": config["x"] + config["offset"]})


def twice(folder: str) -> dict[str, Any]:
    """The same search again under the same name, as a notebook's cell that is run a second time."""
    from horovod_tune.analysis import analyze

    aims = {"metric": "loss", "mode": "min"}
    common: dict[str, Any] = aims | {"name": "twice", "storage_path": folder, "verbose": 0}
    common["callbacks"] = [ExperimentMetadata(dict(aims))]  # as every search of distributed trials has
    grid = {"x": tune.grid_search([1.0, 2.0])}
    first = tune.run(shifted, config=grid | {"offset": 0.0}, reuse_actors=True, **common)
    common["callbacks"] = [ExperimentMetadata(dict(aims))]
    second = tune.run(shifted, config=grid | {"offset": 100.0}, reuse_actors=True, **common)
    read = {"first": analyze(first), "second": analyze(second)}
    return {name: [len(one.trials), one.best_value] for name, one in read.items()}


def fit(name: str, folder: str) -> Any:
    common = {"metric": "loss", "mode": "min"}
    if name == "plain_run":
        return tune.run(
            train, config=SPACE, num_samples=2, name=name, storage_path=folder, verbose=0, **common
        )
    trainable, space, tuning, running = plans()[name]
    # A new actor for each trial would be most of the tests' time.
    tuning = {"reuse_actors": True, **common, **tuning}
    # As every search of distributed trials has.
    metadata = search_metadata(tuning, space, tuning["metric"], tuning["mode"])
    running = {**running, "callbacks": [*running.get("callbacks", []), ExperimentMetadata(metadata)]}
    return tune.Tuner(
        trainable,
        param_space=space,
        tune_config=tune.TuneConfig(**tuning),
        run_config=tune.RunConfig(name=name, storage_path=folder, verbose=0, **running),
    ).fit()


def best_of(analysis: Any, value: float) -> dict[str, Any]:
    checkpoint = analysis.best_checkpoint
    best = {"trial": analysis.best_trial.trial_id, "config": analysis.best_config, "value": value}
    return best | {"checkpoint": checkpoint.path if checkpoint else None}


def main(folder: str, names: list[str]) -> None:
    from horovod_tune.analysis import analyze

    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    seen: dict[str, Any] = {}
    for name in names:
        random.seed(7)
        if name == "twice":
            seen[name] = twice(folder)
            continue
        result = fit(name, folder)
        tunes = getattr(result, "_experiment_analysis", result)
        if tunes.default_metric is None:
            continue
        ours = analyze(result)
        tunes_value = tunes.best_result[tunes.default_metric]
        seen[name] = {"tune": best_of(tunes, tunes_value), "ours": best_of(ours, ours.best_value)}
    (Path(folder) / "seen_by_driver.json").write_text(json.dumps(seen))
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
