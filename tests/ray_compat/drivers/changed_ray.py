"""A search under a Ray whose private functions all take one parameter more; prints what came out, as JSON."""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

# What the patches look at: each gets a parameter that Ray 2.60 does not have.
CHANGED = [
    "ray.tune.execution.tune_controller:TuneController._maybe_cache_trial_actor",
    "ray.tune.execution.tune_controller:TuneController._validate_result_metrics",
    "ray.tune.execution.tune_controller:TuneController._trial_task_failure",
    "ray.tune.execution.tune_controller:TuneController._process_trial_failure",
    "ray.tune.execution.tune_controller:TuneController.pause_trial",
    "ray.tune.execution.class_cache:_ActorClassCache.get",
    "ray.tune.schedulers:HyperBandScheduler.choose_trial_to_run",
    "ray.tune.schedulers:PopulationBasedTraining.choose_trial_to_run",
    "ray.tune.logger:LoggerCallback._restore_from_remote",
    "ray.tune.experimental.output:get_air_verbosity",
    "ray.experimental.internal_kv:_internal_kv_get",
]


def with_one_more(function: Any) -> Any:
    signature = inspect.signature(function)
    more = inspect.Parameter("new_in_this_ray", inspect.Parameter.KEYWORD_ONLY, default=None)

    def changed(*args: Any, new_in_this_ray: Any = None, **keywords: Any) -> Any:
        return function(*args, **keywords)

    functools.update_wrapper(changed, function)
    del changed.__wrapped__  # type: ignore[attr-defined]
    changed.__signature__ = signature.replace(parameters=[*signature.parameters.values(), more])  # type: ignore[attr-defined]
    return changed


def change_ray() -> None:
    for path in CHANGED:
        module, _, names = path.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, name = names.split(".")
        for each in outer:
            owner = getattr(owner, each)
        setattr(owner, name, with_one_more(getattr(owner, name)))


def train(config: dict[str, Any]) -> None:
    import horovod.torch as hvd
    import torch
    from ray.tune import Checkpoint

    from horovod_tune import get_checkpoint, report

    hvd.init()
    done, failed = 0, Path(config["folder"], "failed")
    checkpoint = get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            done = int(Path(directory, "done").read_text())
    for step in range(done + 1, 4):
        loss = hvd.allreduce(torch.tensor(float(config["start"] + step))).item()
        if step == 2 and config["start"] == 0 and not failed.exists():
            hvd.barrier()
            if hvd.rank() == 0:
                failed.touch()
                raise RuntimeError("fails once")
            hvd.barrier()
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "done").write_text(str(step))
            report({"loss": loss, "step": step}, checkpoint=Checkpoint.from_directory(directory))


def main() -> None:
    folder = sys.argv[1]
    change_ray()

    import ray
    from ray import tune

    from horovod_tune import DistributedTrainableCreator, compatibility

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    analysis = tune.run(
        DistributedTrainableCreator(train, num_slots=2),
        config={"start": tune.grid_search([0, 1]), "folder": folder},
        metric="loss",
        mode="min",
        max_failures=1,
        verbose=0,
        storage_path=os.path.join(folder, "results"),
        name="experiment",
        max_concurrent_trials=1,
    )
    patches = [each for each in gc.get_objects() if isinstance(each, compatibility.Patch)]
    told = {
        "statuses": [trial.status for trial in analysis.trials],
        "steps": [trial.last_result["step"] for trial in analysis.trials],
        "failures": [trial.run_metadata.num_failures for trial in analysis.trials],
        "best": {"start": analysis.best_config["start"]},
        "changed": [each.without for each in patches if each._fits is False],
    }
    ray.shutdown()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
