"""The two searches that every peer runs: short trials one after the other, and four at a time."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator
from typing import Any

import psutil
import ray
from ray import tune
from ray.tune.search import ConcurrencyLimiter, Searcher

REPORTS = 3
# How long a step of a trial takes when four trials run at a time.
SECONDS_A_STEP = 0.7
AT_ONCE = 4
RANKS = 2
# Set in every process of a program's Ray, to a text of its own.
MARK = "HOROVOD_TUNE_BENCHMARK"
# The names, cut to what Linux keeps of them, of the processes of trials.
KINDS = {
    "coordinator": "ray::train",
    "training actor": "ray::TrainingAc",
    "template": "horovod_tune_te",
    "rank": "horovod_rank",
}


class RandomSearch(Searcher):
    """Draws a number: a searcher that costs nothing, so that only the trials are measured."""

    def suggest(self, trial_id: str) -> dict[str, Any]:
        return {"x": random.random(), **self.fixed}

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        pass

    fixed: dict[str, Any]


class Ends(tune.Callback):
    """Records when the first result came and when each trial ended, in s since the epoch."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.first_result: float | None = None

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **_: Any) -> None:
        self.first_result = self.first_result or time.time()

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
        self.times.append(time.time())


def start_ray(num_cpus: int = 8, **more: Any) -> None:
    """Start Ray for this program. ``num_cpus`` may be more than the machine has."""
    os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_SYNCER", "1")
    os.environ[MARK] = uuid.uuid4().hex
    ray.init(
        "local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        **more,
    )


def processes_of_trials() -> Iterator[tuple[str, psutil.Process]]:
    """Yield the processes of this program's trials, each with its kind; not all descend from this one."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # of another program
            if process.environ().get(MARK) != os.environ[MARK]:
                continue
            kind = kind_of(process)
            parent = process.parent()
            if kind == "template" and parent is not None and kind_of(parent) == kind:
                kind = "rank"  # it has just been forked
            if kind is not None:
                yield kind, process


def kind_of(process: psutil.Process) -> str | None:
    name = process.name()
    return next((kind for kind, start in KINDS.items() if name.startswith(start)), None)


def search(
    trainable: Any, kind: str, trials: int, backend: str = "horovod", **run_options: Any
) -> dict[str, float]:
    """Run ``trials`` trials of ``trainable`` and return the seconds that they took.

    ``kind`` is ``turnaround`` (one after the other, no pause in the function) or ``concurrent``
    (AT_ONCE under a ConcurrencyLimiter, REPORTS steps of SECONDS_A_STEP each).
    """
    searcher = RandomSearch(metric="x", mode="max")
    searcher.fixed = {"step_s": SECONDS_A_STEP if kind == "concurrent" else 0.0, "backend": backend}
    at_once = AT_ONCE if kind == "concurrent" else 1
    ends = Ends()
    storage = tempfile.mkdtemp(prefix="benchmark_")
    started = time.time()
    analysis = tune.run(
        trainable,
        name=kind,
        num_samples=trials,
        search_alg=ConcurrencyLimiter(searcher, max_concurrent=at_once),
        metric="x",
        mode="max",
        storage_path=storage,
        callbacks=[ends],
        verbose=0,
        **run_options,
    )
    wall_s = time.time() - started
    done = [trial.last_result.get("training_iteration") for trial in analysis.trials]
    shutil.rmtree(storage, ignore_errors=True)
    assert done == [REPORTS] * trials, f"every trial must report {REPORTS} times, got {done}"
    gaps = [later - earlier for earlier, later in zip(ends.times, ends.times[1:], strict=False)]
    figures = {"wall_s": wall_s, "first_trial_s": ends.times[0] - started, "trial_mean_s": wall_s / trials}
    if kind == "turnaround":
        figures["trial_s"] = statistics.median(gaps)
    else:
        ideal_s = trials / AT_ONCE * REPORTS * SECONDS_A_STEP
        figures["efficiency"] = ideal_s / wall_s
    return figures


def arguments(
    description: str | None, trials: int, backends: tuple[str, ...] = ("horovod",)
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("kind", choices=["turnaround", "concurrent"])
    parser.add_argument("--trials", type=int, default=trials)
    parser.add_argument("--backend", choices=backends, default=backends[0])
    return parser.parse_args()


def publish(figures: dict[str, float]) -> None:
    """Hand the figures to the benchmark that runs this program, or print them."""
    path = os.environ.get("BENCHMARK_RESULT")
    if path:
        with open(path, "w") as file:
            json.dump(figures, file)
    else:
        print(json.dumps({name: round(value, 4) for name, value in figures.items()}))
