"""A search that appends a line for every iteration that it really ran: what a requeue must not repeat."""

import json
import os
import tempfile
import time
from pathlib import Path

import ray
from ray import tune

from horovod_tune.cluster.resume import resume_or_start

STORAGE = os.environ["STORAGE"]
ITERATIONS = int(os.environ.get("ITERATIONS", "8"))


def count(config: dict) -> None:
    done = 0
    if checkpoint := tune.get_checkpoint():
        with checkpoint.as_directory() as directory:
            done = json.loads((Path(directory) / "done.json").read_text())
    for step in range(done + 1, ITERATIONS + 1):
        time.sleep(0.5)
        with tempfile.TemporaryDirectory() as directory:
            (Path(directory) / "done.json").write_text(json.dumps(step))
            tune.report({"step": step}, checkpoint=tune.Checkpoint.from_directory(directory))
        with open(f"{STORAGE}/steps.txt", "a") as lines:
            lines.write(f"{config['x']} {step}\n")


ray.init()
results = resume_or_start(
    count,
    param_space={"x": tune.grid_search([1, 2])},
    tune_config=tune.TuneConfig(metric="step", mode="max"),
    run_config=tune.RunConfig(name="counting", storage_path=STORAGE, verbose=0),
).fit()
print("steps", sorted(result.metrics["step"] for result in results))
