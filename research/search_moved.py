"""Searches on functions whose optimum is at a random place, which differs between seeds; 4 in flight.

    python research/search_moved.py run --methods horovod_tune random     # rows for search_moved.csv
    python research/search_moved.py report                                # the table

Authors of test functions put the optimum somewhere inside the space; here it is not chosen. Weights and
rotations are drawn with the seed too. Methods and packages are those of `search_quality.py`.
"""

from __future__ import annotations

import argparse
import logging
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ray import tune
from result_rows import ResultRows
from search_problems import Config, Problem
from search_quality import FIELDS, METHODS, measured
from search_report import at_marks

RESULTS = Path(__file__).parent / "results" / "search_moved.csv"
#: Kinds of functions with their number of parameters.
KINDS = {
    "bowl": 4,
    "ackley": 4,
    "rosenbrock": 4,
    "levy": 6,
    "three_of_ten": 10,
    "corner": 5,
    "noisy": 3,
    "narrow": 3,
}
#: Spaces with categories too: `mixed` has ten parameters, three of them without effect; `conditional` has
#: three or four numbers at a time.
OTHERS = ("mixed", "conditional")
NOISE = 0.02


def moved(kind: str, seed: int) -> Problem:
    """Return a function on the unit cube whose optimum, 0, is anywhere in it."""
    generator, dimension = np.random.default_rng([seed, 99]), KINDS[kind]
    best = generator.random(dimension)
    turned = np.linalg.qr(generator.standard_normal((dimension, dimension)))[0]
    weights = 10.0 ** generator.uniform(-1, 1, dimension)
    corner = np.rint(best)

    def bowl(x: np.ndarray) -> float:
        return float(np.sum(weights * (turned @ (x - best)) ** 2))

    def ackley(x: np.ndarray) -> float:
        z = turned @ (x - best) * 20
        waves = np.exp(np.mean(np.cos(2 * math.pi * z)))
        return float(-20 * np.exp(-0.2 * math.sqrt(np.mean(z**2))) - waves + 20 + math.e)

    def rosenbrock(x: np.ndarray) -> float:
        y = 1 + (x - best) * 4
        return float(np.sum(100 * (y[1:] - y[:-1] ** 2) ** 2 + (1 - y[:-1]) ** 2))

    def levy(x: np.ndarray) -> float:
        y = 1 + (x - best) * 5
        inner = np.sum((y[:-1] - 1) ** 2 * (1 + 10 * np.sin(math.pi * y[:-1] + 1) ** 2))
        last = (y[-1] - 1) ** 2 * (1 + np.sin(2 * math.pi * y[-1]) ** 2)
        return float(math.sin(math.pi * y[0]) ** 2 + inner + last)

    def three_of_ten(x: np.ndarray) -> float:
        return float(np.sum((weights * (x - best) ** 2)[:3]))

    def towards_corner(x: np.ndarray) -> float:
        return float(np.sum(weights * np.abs(x - corner)))

    def narrow(x: np.ndarray) -> float:
        z = x - best
        return float(1 - np.exp(-10 * np.sum(weights * z**2)) + 0.1 * np.sum(np.abs(z)))

    functions: dict[str, Callable[[np.ndarray], float]] = {
        "bowl": bowl,
        "ackley": ackley,
        "rosenbrock": rosenbrock,
        "levy": levy,
        "three_of_ten": three_of_ten,
        "corner": towards_corner,
        "noisy": bowl,
        "narrow": narrow,
    }
    names = [f"x{i}" for i in range(dimension)]
    return Problem(
        kind,
        f"moved, {dimension}-D",
        lambda: {name: tune.uniform(0.0, 1.0) for name in names},
        lambda config: functions[kind](np.asarray([config[name] for name in names])),
        optimum=0.0,
        noise=NOISE if kind == "noisy" else 0.0,
    )


def mixed(seed: int) -> Problem:
    """Return a function of two categories, an ordered choice, an integer and six numbers, three of them idle.

    The best numbers differ between the options of one category, by as much as a fifth of their ranges.
    """
    generator = np.random.default_rng([seed, 98])
    optimizers, schedules, sizes = (
        ["sgd", "adam", "rmsprop"],
        ["constant", "step", "cosine"],
        [16, 32, 64, 128],
    )
    floors = {
        name: generator.permutation([0.0, *generator.uniform(0.05, 0.4, 2)]) for name in ("first", "second")
    }
    weights, best = 10.0 ** generator.uniform(-1, 0.5, 3), generator.random(3)
    each = np.clip(best + generator.uniform(-0.2, 0.2, (3, 3)), 0, 1)
    size, layers = int(generator.integers(4)), int(generator.integers(1, 8))

    def value(config: Config) -> float:
        option = optimizers.index(config["optimizer"])
        found = floors["first"][option] + floors["second"][schedules.index(config["schedule"])]
        found += np.sum(weights * (np.array([config["x0"], config["x1"], config["x2"]]) - each[option]) ** 2)
        found += 0.05 * abs(sizes.index(config["batch_size"]) - size)
        return float(found + 0.02 * (config["layers"] - layers) ** 2)

    def space() -> Config:
        numbers = {f"x{i}": tune.uniform(0.0, 1.0) for i in range(6)}
        return {
            "optimizer": tune.choice(optimizers),
            "schedule": tune.choice(schedules),
            "batch_size": tune.choice(sizes),
            "layers": tune.randint(1, 8),
            **numbers,
        }

    return Problem("mixed", "moved, mixed, 10-D", space, value, optimum=0.0)


def conditional(seed: int) -> Problem:
    """Return a function of two models with two and three parameters of their own, and one that both have."""
    generator = np.random.default_rng([seed, 97])
    inner = {"forest": ["depth", "leaf"], "network": ["lr", "dropout", "width"]}
    names = list(inner)
    floors = dict(zip(names, generator.permutation([0.0, generator.uniform(0.02, 0.3)]), strict=True))
    best = {name: generator.random(len(inner[name])) for name in names}
    weights = {name: 10.0 ** generator.uniform(-1, 0.5, len(inner[name])) for name in names}
    shared = generator.random()

    def value(config: Config) -> float:
        model = config["model"]
        if isinstance(model, str):
            model = {"name": model, **{key: config[f"{model}_{key}"] for key in inner[model]}}
        name = model["name"]
        x = np.array([model[key] for key in inner[name]])
        found = floors[name] + np.sum(weights[name] * (x - best[name]) ** 2)
        return float(found + 0.5 * (config["augment"] - shared) ** 2)

    def space() -> Config:
        options = [
            {"name": name, **{key: tune.uniform(0.0, 1.0) for key in keys}} for name, keys in inner.items()
        ]
        return {"model": tune.choice(options), "augment": tune.uniform(0.0, 1.0)}

    def flat() -> Config:
        every = [f"{name}_{key}" for name, keys in inner.items() for key in keys]
        numbers = {key: tune.uniform(0.0, 1.0) for key in (*every, "augment")}
        return {"model": tune.choice(names), **numbers}

    return Problem("conditional", "moved, conditional", space, value, optimum=0.0, flat_space=flat)


def problem_of(kind: str, seed: int) -> Problem:
    return {"mixed": mixed, "conditional": conditional}.get(kind, lambda s: moved(kind, s))(seed)


def run(methods: list[str], seeds: int, output: Path) -> None:
    rows = ResultRows(output, FIELDS, keys=3)
    for seed in range(seeds):
        for method in methods:
            for kind in (*OTHERS, *KINDS):
                if not rows.has(method, kind, seed):
                    row: dict[str, Any] = measured(problem_of(kind, seed), method, seed)
                    rows.add(row)
                    print(method, kind, seed, row.get("regret_40"), row["note"], flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("--methods", nargs="+", default=["horovod_tune", "random"], choices=METHODS)
    runner.add_argument("--seeds", type=int, default=11)
    for command in (runner, commands.add_parser("report")):
        command.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.methods, arguments.seeds, arguments.output)
    else:
        at_marks(arguments.output, [*KINDS, *OTHERS], (10, 20, 40))


if __name__ == "__main__":
    main()
