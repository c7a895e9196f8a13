"""How long BayesOptSearch takes for a suggestion, by the number of results it has; 4 trials in flight.

    OMP_NUM_THREADS=1 python benchmarks/search_speed.py

Prints milliseconds, median and 95th percentile, of wall clock and of CPU time. Each suggestion follows a new
result, so that each includes a fit of the Gaussian process.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
from search_problems import PROBLEMS

from horovod_tune.search import BayesOptSearch


def measure(problem_name: str, results: int, repeats: int) -> tuple[np.ndarray, np.ndarray]:
    """Return wall-clock and CPU milliseconds of `repeats` suggestions after `results` results."""
    problem = PROBLEMS[problem_name]
    generator = np.random.default_rng(0)
    search = BayesOptSearch(metric="loss", mode="min", random_state=0)
    search.set_search_properties("loss", "min", problem.space())
    drawn = BayesOptSearch(metric="loss", mode="min", random_search_steps=10**9, random_state=1)
    drawn.set_search_properties("loss", "min", problem.space())
    for number in range(results):
        config = drawn.suggest(str(number))
        search.add_evaluated_point(config, problem.observe(config, generator))
    live = {f"live{i}": search.suggest(f"live{i}") for i in range(3)}
    wall, cpu = [], []
    for number in range(repeats):
        before = time.perf_counter(), time.process_time()
        live[f"t{number}"] = search.suggest(f"t{number}")
        wall.append(time.perf_counter() - before[0])
        cpu.append(time.process_time() - before[1])
        trial_id = next(iter(live))
        search.on_trial_complete(trial_id, {"loss": problem.observe(live.pop(trial_id), generator)})
    return 1e3 * np.array(wall), 1e3 * np.array(cpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=["branin", "mixed_network", "levy10"])
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    print(f"{'function':16}{'results':>8}{'wall p50':>10}{'p95':>7}{'CPU p50':>10}{'p95':>7}")
    for name in arguments.problems:
        for results in (40, 100, 500, 1000, 2000):
            wall, cpu = measure(name, results, arguments.repeats)
            cells = [np.median(wall), np.quantile(wall, 0.95), np.median(cpu), np.quantile(cpu, 0.95)]
            print(f"{name:16}{results:8}{cells[0]:10.0f}{cells[1]:7.0f}{cells[2]:10.0f}{cells[3]:7.0f}")


if __name__ == "__main__":
    main()
