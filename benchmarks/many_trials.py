"""A thousand trials: the driver's share of a report, its memory, and that of the trials' coordinators.

    python -m benchmarks.many_trials [--trials 1000] [--at-once 16]

One rank per trial and three reports, against a plain Tune function with actor reuse that reports the same.
CPU time is measured, so that other work on the machine matters little. The memory of coordinators,
ranks and the other processes of trials is their proportional set size (PSS) in the middle of the search.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from typing import Any

import psutil
from ray import tune
from ray.tune.search import ConcurrencyLimiter

from benchmarks.programs import trials

REPORTS = 3


def train(config: dict[str, Any]) -> None:
    from horovod_tune import report

    for step in range(REPORTS):
        report(loss=config["x"] + step)


def plain(config: dict[str, Any]) -> None:
    for step in range(REPORTS):
        tune.report({"loss": config["x"] + step})


class Watch(tune.Callback):
    """Measures the driver after every hundredth trial, and the trials' processes once."""

    def __init__(self, look_at: int) -> None:
        self.memory_mb: list[float] = []
        self.pss_mb: dict[str, list[float]] = {}
        self._ended, self._look_at = 0, look_at

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **_: Any) -> None:
        self._ended += 1
        if self._ended % 100 == 0:
            self.memory_mb.append(psutil.Process().memory_info().rss / 1e6)
        if self._ended == self._look_at:
            self._look()

    def _look(self) -> None:
        for kind, process in trials.processes_of_trials():
            with contextlib.suppress(psutil.NoSuchProcess):
                self.pss_mb.setdefault(kind, []).append(process.memory_full_info().pss / 1e6)


def search(trainable: Any, number: int, at_once: int, watch: Watch) -> float:
    """Run `number` trials; return the driver's CPU time per report, in ms."""
    searcher = trials.RandomSearch()
    searcher.fixed = {}
    began = time.process_time()
    with tempfile.TemporaryDirectory() as storage:
        tune.run(
            trainable,
            search_alg=ConcurrencyLimiter(searcher, max_concurrent=at_once),
            num_samples=number,
            storage_path=storage,
            callbacks=[watch],
            reuse_actors=True,
            verbose=0,
        )
    return 1e3 * (time.process_time() - began) / (number * REPORTS)


def main() -> None:
    from horovod_tune import DistributedTrainableCreator

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=16)
    options = parser.parse_args()
    trials.start_ray(num_cpus=options.at_once)
    for name, trainable in (
        ("plain Tune function", plain),
        ("horovod_tune", DistributedTrainableCreator(train, num_slots=1)),
    ):
        watch = Watch(options.trials // 2)
        cpu_ms = search(trainable, options.trials, options.at_once, watch)
        print(f"{name}: {cpu_ms:.2f} ms of the driver's CPU per report")
        growth = (watch.memory_mb[-1] - watch.memory_mb[0]) / max(len(watch.memory_mb) - 1, 1)
        print(f"  driver: {watch.memory_mb[-1]:.0f} MB, {growth:+.1f} MB per 100 trials")
        for kind, sizes in watch.pss_mb.items():
            print(f"  {len(sizes)} {kind}s: {sum(sizes) / len(sizes):.0f} MB each")


if __name__ == "__main__":
    main()
