"""A `horovodrun` or `torchrun` subprocess for every trial."""

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


def launcher(backend: str, ranks: int) -> list[str]:
    """Return the command that runs Python, with the arguments that follow, in this many ranks."""
    if backend == "torch":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    horovodrun = str(Path(sys.executable).with_name("horovodrun"))
    return [sys.executable, horovodrun, "--gloo", "-np", str(ranks), sys.executable]


def launch(x: float, step_s: float, reports: int, path: str, backend: str = "horovod") -> None:
    function = [
        "-m",
        "benchmarks.programs.horovodrun_function",
        backend,
        str(x),
        str(step_s),
        str(reports),
        path,
    ]
    command = launcher(backend, trials.RANKS) + function
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
