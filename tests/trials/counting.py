"""The training function of trials that are restarted, exploited, paused, resized: it counts its steps."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import cloudpickle

from horovod_tune import get_checkpoint, report

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def train(config: dict[str, Any]) -> None:
    """Sum the numbers of config["steps"] steps, with a checkpoint per step; every rank starts from it.

    A step that is done twice or left out shows in every later sum. After the step config["die_at"] the last
    rank is killed, once.
    """
    import horovod.torch as hvd
    import torch

    hvd.init()
    state = {"step": 0, "sum": 0.0, "name": "fresh"}
    checkpoint = get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as directory:
            state = json.loads(Path(directory, "sub", "state").read_text())
    origin = state["name"]
    starts = hvd.allgather(torch.tensor([state["step"]]), name="start").tolist()
    while state["step"] < config["steps"]:
        step = state["step"] + 1
        mean = hvd.allreduce(torch.tensor([float(step)], dtype=torch.float64)).item()
        state = {"step": step, "sum": state["sum"] + mean, "name": config.get("name", "x")}
        print("step", step)
        with tempfile.TemporaryDirectory() as directory:
            if hvd.rank() == 0:
                Path(directory, "sub").mkdir()
                Path(directory, "sub", "state").write_text(json.dumps(state))
            found = {
                "step": step,
                "sum": state["sum"],
                "ranks": hvd.size(),
                "starts": starts,
                "origin": origin,
            }
            figures = {"value": config.get("gain", 1) * step, "loss": config.get("x", 0) + 1 / step}
            report({**found, **figures, "pid": os.getpid()}, checkpoint=directory)
        if step == config.get("die_at"):
            is_first = not os.path.exists(config["once"])
            hvd.barrier()
            if is_first and hvd.rank() == hvd.size() - 1:
                Path(config["once"]).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            hvd.barrier()
