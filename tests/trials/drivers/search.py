"""A driver that tests start, interrupt and kill: two 2-rank trials, one at a time, a checkpoint per step.

    python search.py RAY_TEMP_DIR STORAGE [--restore]

At the end it prints one JSON line with each trial's last result.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import ray
from ray import tune

from horovod_tune import DistributedTrainableCreator, get_checkpoint, report


def train(config):
    import horovod.torch as hvd

    hvd.init()
    count = start = 0
    checkpoint = get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as directory:
            count = start = int(Path(directory, "count").read_text())
    while count < 6:
        count += 1
        if hvd.rank() == 0:
            Path(config["marks"], f"{config['name']}-{count}-{os.getpid()}").touch()
        if not Path(config["marks"], "quick").exists():
            time.sleep(0.5)
        with tempfile.TemporaryDirectory() as directory:
            if hvd.rank() == 0:
                Path(directory, "count").write_text(str(count))
            report({"count": count, "start": start}, checkpoint=directory)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("temp_dir")
    parser.add_argument("storage")
    parser.add_argument("--restore", action="store_true")
    args = parser.parse_args()
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, _temp_dir=args.temp_dir)
    trainable = DistributedTrainableCreator(train, num_slots=2)
    if args.restore:
        Path(args.storage, "quick").touch()
        tuner = tune.Tuner.restore(str(Path(args.storage, "driver")), trainable, resume_errored=True)
    else:
        tuner = tune.Tuner(
            trainable,
            param_space={"marks": args.storage, "name": tune.grid_search(["a", "b"])},
            tune_config=tune.TuneConfig(max_concurrent_trials=1),
            run_config=tune.RunConfig(storage_path=args.storage, name="driver", verbose=0),
        )
    results = tuner.fit()
    keep = ("count", "start", "training_iteration")
    print(json.dumps({r.config["name"]: {key: r.metrics.get(key) for key in keep} for r in results}))


if __name__ == "__main__":
    main()
