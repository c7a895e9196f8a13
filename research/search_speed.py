"""How long a suggestion of BayesOptSearch takes, by the number of results; 4 trials in flight.

    OMP_NUM_THREADS=1 python research/search_speed.py

Prints milliseconds, median and 95th percentile, of wall-clock and of CPU time. Each suggestion follows a new
result, so that each includes a fit of the Gaussian process. With --curves trials report every epoch: of 27
trials, 18 end after epoch 2, 6 after 6, 2 after 18 and 1 after 52.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from search_problems import PROBLEMS

from horovod_tune.search import BayesOptSearch


def measure(problem_name: str, results: int, repeats: int, curves: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return wall-clock and CPU milliseconds of `repeats` suggestions after `results` results."""
    problem = PROBLEMS[problem_name]
    generator = np.random.default_rng(0)
    search = BayesOptSearch(metric="loss", mode="min", random_state=0)
    search.set_search_properties("loss", "min", problem.space())
    drawn = BayesOptSearch(metric="loss", mode="min", random_search_steps=10**9, random_state=1)
    drawn.set_search_properties("loss", "min", problem.space())
    for number in range(results):
        config = drawn.suggest(str(number))
        loss = problem.observe(config, generator)
        if not curves:
            search.add_evaluated_point(config, loss)
            continue
        search.on_trial_complete(str(number), {f"config/{k}": v for k, v in _flat(config)})
        for epoch in range(1, _last_epoch(number) + 1):
            search.on_trial_result(str(number), {"loss": loss + 1 / epoch, "training_iteration": epoch})
        search.on_trial_complete(str(number), {"loss": loss + 1 / epoch, "training_iteration": epoch})
    live = {f"live{i}": search.suggest(f"live{i}") for i in range(3)}
    wall, cpu = [], []
    for number in range(repeats):
        before = time.perf_counter(), time.process_time()
        live[f"t{number}"] = search.suggest(f"t{number}")
        wall.append(time.perf_counter() - before[0])
        cpu.append(time.process_time() - before[1])
        trial_id = next(iter(live))
        result = {"loss": problem.observe(live.pop(trial_id), generator), "training_iteration": 2}
        search.on_trial_complete(trial_id, result)
    return 1e3 * np.array(wall), 1e3 * np.array(cpu)


def _last_epoch(number: int) -> int:
    return next(epochs for every, epochs in ((27, 52), (9, 18), (3, 6), (1, 2)) if number % every == 0)


def _flat(config: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{name}/")
        else:
            yield f"{above}{name}", value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=["branin", "mixed_network", "levy10"])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--results", nargs="+", type=int, default=[40, 100, 500, 1000, 2000])
    parser.add_argument("--curves", action="store_true")
    arguments = parser.parse_args()
    print(f"{'function':16}{'results':>8}{'wall p50':>10}{'p95':>7}{'CPU p50':>10}{'p95':>7}")
    for name in arguments.problems:
        for results in arguments.results:
            wall, cpu = measure(name, results, arguments.repeats, arguments.curves)
            cells = [np.median(wall), np.quantile(wall, 0.95), np.median(cpu), np.quantile(cpu, 0.95)]
            print(f"{name:16}{results:8}{cells[0]:10.0f}{cells[1]:7.0f}{cells[2]:10.0f}{cells[3]:7.0f}")


if __name__ == "__main__":
    main()
