"""A `horovodrun` subprocess for every trial, or one of `torchrun`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ray import tune

from benchmarks.programs import trials


def launch(x: float, step_s: float, reports: int, path: str, backend: str = "horovod") -> None:
    if backend == "torch":
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        function = ["-m", "benchmarks.programs.horovodrun_function"]
    else:
        launcher = [sys.executable, str(Path(sys.executable).with_name("horovodrun")), "--gloo", "-np"]
        function = [sys.executable, "-m", "benchmarks.programs.horovodrun_function"]
    command = [*launcher, str(trials.RANKS), *function, backend, str(x), str(step_s), str(reports), path]
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def trial(config: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as file:
        launch(config["x"], config["step_s"], trials.REPORTS, file.name, config["backend"])
        for line in file:
            tune.report({"x": json.loads(line)["x"]})


if __name__ == "__main__":
    options = trials.arguments(__doc__, trials=3, backends=("horovod", "torch"))
    trials.start_ray()
    placed = tune.with_resources(trial, {"cpu": trials.RANKS})
    trials.publish(trials.search(placed, options.kind, options.trials, backend=options.backend))
