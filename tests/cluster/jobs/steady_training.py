"""One trial on several hosts that trains until a file appears, and prints what Tune sees of it.

With a second argument it is an elastic one of three ranks, of which so many must remain.
"""

import os
import socket
import sys
import tempfile
import time
from pathlib import Path

import ray
import torch
from ray import tune

from horovod_tune import DistributedTrainableCreator, commit, get_checkpoint, get_state, report

TIMEOUT_S = float(sys.argv[1])
STOP = "/shared/stop"


def steps(step):
    """Yield a result for each step after ``step`` until the file appears."""
    import horovod.torch as hvd

    hosts = " ".join(hvd.allgather_object(f"{socket.gethostname()}:{os.getpid()}"))
    data = torch.ones(250_000)
    while not hvd.allreduce(torch.tensor(float(os.path.exists(STOP))), name="stop").item():
        step += 1
        hvd.allreduce(data, name="data")
        time.sleep(0.2)
        yield {"step": step, "hosts": hosts}


def train(config):
    import horovod.torch as hvd

    hvd.init()
    step = 0
    if checkpoint := get_checkpoint():
        with checkpoint.as_directory() as directory:
            step = int((Path(directory) / "step").read_text())
    for result in steps(step):
        with tempfile.TemporaryDirectory() as directory:
            if hvd.rank() == 0:
                (Path(directory) / "step").write_text(str(result["step"]))
            report(result, checkpoint=directory)


def train_and_commit(config):
    import horovod.torch as hvd

    hvd.init()
    for result in steps((get_state() or {"step": 0})["step"]):
        report(result)
        commit({"step": result["step"]})


class Say(tune.Callback):
    def on_trial_result(self, iteration, trials, trial, result, **_):
        saw = f"SAW step {result['step']} hosts {result['hosts']} failures {trial.num_failures}"
        print(f"{time.time():.2f} {saw} change {result.get('world_change_s', 0)}", flush=True)


ray.init(address="auto", log_to_driver=False)
# By its name: the preflight, which others test, is a part of what the class itself is given to.
if len(sys.argv) > 2:
    trainable = DistributedTrainableCreator(
        train_and_commit, num_hosts=3, min_workers=int(sys.argv[2]), timeout_s=TIMEOUT_S
    )
else:
    trainable = DistributedTrainableCreator(train, num_hosts=2, timeout_s=TIMEOUT_S)
tune.register_trainable("train", trainable)
results = tune.Tuner(
    "train",
    tune_config=tune.TuneConfig(metric="step", mode="max"),
    run_config=tune.RunConfig(
        name="steady",
        verbose=0,
        failure_config=tune.FailureConfig(max_failures=40),
        checkpoint_config=tune.CheckpointConfig(num_to_keep=2),
        callbacks=[Say()],
    ),
).fit()
print("ENDED errors", results.num_errors, flush=True)
deadline = time.monotonic() + 30
while time.monotonic() < deadline:
    total, free = ray.cluster_resources().get("CPU"), ray.available_resources().get("CPU")
    if total == free:
        break
    time.sleep(0.5)
print(f"CPUS {free} free of {total}", flush=True)
