"""What `BayesOptSearch(analysis=...)` gains from an earlier experiment on other data, and what it costs.

    python research/search_transfer.py [--seeds 11] [--model MODEL]

Each problem is searched from scratch, and with 40 random results of an earlier one: the same function, a
related one (moved, on another scale, with other weights), an unrelated or an opposite one. Regret is the
median over the seeds, after 5, 10, 20 and 30 evaluations, one at a time. With MODEL, the path of LCBench's
surrogate (see `lcbench.py`), some of its tasks are searched too, each after another one.

One core is enough: set OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import csv
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from lcbench import Task
from lcbench import space as lcbench_space
from search_problems import PROBLEMS, Config, Problem, branin, hartmann6, lr_valley, mixed_network
from search_quality import RandomSearch

RESULTS = Path(__file__).parent / "results" / "search_transfer.csv"
EVALUATIONS = (5, 10, 20, 30)
EARLIER_RESULTS = 40
Function = Callable[[Config], float]
FIELDS = ["problem", "earlier", "seed", *(f"regret_{n}" for n in EVALUATIONS)]


def _moved(function: Function, by: float, low: float, high: float) -> Function:
    """Return the function moved along every axis by a fraction `by` of its range, with stretched values."""

    def moved(config: Config) -> float:
        return (
            3.0 * function({k: min(max(v + by * (high - low), low), high) for k, v in config.items()}) + 7.0
        )

    return moved


def _mirrored(function: Function, low: float, high: float) -> Function:
    return lambda config: function({name: low + high - value for name, value in config.items()})


def _moved_valley(config: Config) -> float:
    return 2.0 * lr_valley({**config, "lr": config["lr"] / 3, "weight_decay": config["weight_decay"] * 3}) + 1


def _other_network(config: Config) -> float:
    wide = {**config, "width": config["width"] / 2, "lr": config["lr"] * 2}
    return 0.5 * mixed_network(wide) + (0.1 if config["optimizer"] == "rmsprop" else 0.0)


def _of_no_use(config: Config) -> float:
    return math.sin(zlib.crc32(repr(config).encode()))


def pairs() -> Iterator[tuple[str, Any, dict[str, Function]]]:
    """Yield problems by name, with the functions that may have been searched before them."""
    for name, function, low, high in (("branin", branin, -5, 15), ("hartmann6", hartmann6, 0, 1)):
        yield (
            name,
            PROBLEMS[name],
            {
                "same": function,
                "related": _moved(function, 0.05, low, high),
                "mirrored": _mirrored(function, low, high),
                "opposite": lambda config, f=function: -f(config),
                "noise": _of_no_use,
            },
        )
    yield "lr_valley", PROBLEMS["lr_valley"], {"related": _moved_valley, "noise": _of_no_use}
    yield "mixed_network", PROBLEMS["mixed_network"], {"related": _other_network, "noise": _of_no_use}


#: LCBench's tasks that are searched, and the one that was searched before each.
LCBENCH = {7593: 3945, 189354: 126026, 146212: 34539, 189905: 189873}


def lcbench_pairs(model: Path) -> Iterator[tuple[str, Any, dict[str, Function]]]:
    """Yield LCBench's tasks as `pairs` does; the metric is the error after the last epoch."""
    for number, before in LCBENCH.items():
        task, earlier = Task(model, number), Task(model, before)
        problem = Problem(f"lcbench_{number}", "", lcbench_space, lambda c, t=task: t.curve(c)[0][-1], 0.0)
        problem = replace(problem, optimum=task.best_error)
        yield problem.name, problem, {str(before): lambda config, t=earlier: t.curve(config)[0][-1]}


def table_of(function: Function, space: Config, seed: int) -> pd.DataFrame:
    """Return random results of a function, as an experiment's table."""
    random = RandomSearch(1000 + seed)
    random.set_search_properties("loss", "min", space)
    rows = []
    for number in range(EARLIER_RESULTS):
        config = random.suggest(str(number))
        rows.append({**{f"config/{k}": v for k, v in config.items()}, "loss": function(config)})
    return pd.DataFrame(rows)


def search(problem: Any, analysis: pd.DataFrame | None, seed: int) -> list[float]:
    """Return the regret after each of `EVALUATIONS`."""
    from horovod_tune.search import BayesOptSearch

    searcher = BayesOptSearch(metric="loss", mode="min", random_state=seed, analysis=analysis)
    searcher.set_search_properties("loss", "min", problem.space())
    generator = np.random.default_rng(seed)
    best, regrets = math.inf, []
    for number in range(max(EVALUATIONS)):
        config = searcher.suggest(str(number))
        searcher.on_trial_complete(str(number), {"loss": problem.observe(config, generator)})
        best = min(best, problem.true_value(config))
        if number + 1 in EVALUATIONS:
            regrets.append(best - problem.optimum)
    return regrets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=11)
    parser.add_argument("--problems", nargs="*")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    with options.output.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(FIELDS)
        for name, problem, functions in chain(pairs(), lcbench_pairs(options.model) if options.model else ()):
            if options.problems and name not in options.problems:
                continue
            for earlier, function in {"nothing": None, **functions}.items():
                rows = []
                for seed in range(options.seeds):
                    analysis = table_of(function, problem.space(), seed) if function else None
                    rows.append(search(problem, analysis, seed))
                    writer.writerow([name, earlier, seed, *(f"{each:.4g}" for each in rows[-1])])
                    file.flush()
                middle = "  ".join(f"{each:8.3g}" for each in np.median(rows, axis=0))
                print(f"{name:14} {earlier:10} {middle}", flush=True)


if __name__ == "__main__":
    main()
