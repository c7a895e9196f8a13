"""A search whose ranks count: a line for every iteration that really ran, which a requeue must not repeat."""

import os
import socket
import tempfile
import time
from pathlib import Path

import ray
from ray import tune

from horovod_tune import DistributedTrainableCreator, get_checkpoint, report, resume_or_start

STORAGE = os.environ["STORAGE"]
ITERATIONS = int(os.environ.get("ITERATIONS", "8"))


def count(config):
    import horovod.torch as hvd

    hvd.init()
    done = 0
    if checkpoint := get_checkpoint():
        with checkpoint.as_directory() as directory:
            done = int((Path(directory) / "done").read_text())
    hosts = " ".join(sorted(hvd.allgather_object(socket.gethostname())))
    for step in range(done + 1, ITERATIONS + 1):
        time.sleep(0.5)
        with tempfile.TemporaryDirectory() as directory:
            if hvd.rank() == 0:
                (Path(directory) / "done").write_text(str(step))
                with open(f"{STORAGE}/steps.txt", "a") as lines:
                    lines.write(f"{config['x']} {step} {hosts}\n")
            report({"step": step, "hosts": hosts}, checkpoint=directory)


ray.init()
results = resume_or_start(
    DistributedTrainableCreator(count, num_hosts=2),
    param_space={"x": tune.grid_search([1, 2])},
    tune_config=tune.TuneConfig(metric="step", mode="max"),
    run_config=tune.RunConfig(name="counting", storage_path=STORAGE, verbose=0),
).fit()
print("steps", [result.metrics.get("step") for result in results])
