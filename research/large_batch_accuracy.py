"""Accuracy against the global batch at the same number of epochs, for several ways to train.

    OMP_NUM_THREADS=1 python research/large_batch_accuracy.py

One process computes the whole batch: N ranks with a part each do the same (tests/large_batch/test_worlds.py).
The base rate of each optimiser is tuned once, at 1x, with seeds of its own; nothing is tuned at larger
batches. Writes research/results/large_batch.json and draws large_batch.png next to it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from large_batch_problems import PROBLEMS, Problem

from horovod_tune.large_batch import (
    BatchGrowth,
    CurvatureGrowth,
    FixedGrowth,
    HyperparameterError,
    NoiseScale,
    NoiseScaleGrowth,
    from_config,
    largest_eigenvalue,
)

RESULTS = Path(__file__).parent / "results" / "large_batch.json"
FACTORS = (1, 4, 16, 32)
TUNING_SEEDS, SEEDS = (100, 101), (0, 1, 2, 3, 4)
GRIDS = {
    "sgd": (0.02, 0.05, 0.1, 0.2),
    "lars": (0.05, 0.1, 0.2, 0.5),
    "lamb": (0.005, 0.01, 0.02, 0.05),
}
WARMUP = 0.2
# For each way: the fraction of the training that warms up, the optimiser and the scaling rule.
WAYS: dict[str, tuple[float, str, str]] = {
    "SGD, rate unchanged": (0.0, "sgd", "none"),
    "linear scaling": (0.0, "sgd", "linear"),
    "linear scaling, warm-up": (WARMUP, "sgd", "linear"),
    "LARS, square root, warm-up": (WARMUP, "lars", "sqrt"),
    "LAMB, square root, warm-up": (WARMUP, "lamb", "sqrt"),
}
# The first is reached before a batch has grown much, the second is not.
TARGETS = {"digits": (0.95, 0.975), "spirals": (0.95, 0.99)}
LIMIT = 32
# Moving averages of the noise scale over about 330 steps instead of 100.
LONG_DECAY = 0.997


def accuracy(model: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the fraction of `inputs` that the model classifies correctly."""
    with torch.no_grad():
        return float((model(inputs).argmax(1) == labels).float().mean())


def train(problem: Problem, config: dict[str, Any], seed: int, growth: dict[str, Any] | None = None) -> dict:
    """Train once; return accuracies and steps by epoch, the last batch size, and times in seconds."""
    inputs, labels, held_out, answers = problem.data()
    model = problem.model(seed)
    config = {"epochs": problem.epochs, "base_batch_size": problem.base_batch_size, **config}
    meter = NoiseScale(every=1, decay=growth.get("decay", 0.99)) if growth else None
    setup = from_config(model, config, num_samples=len(inputs), noise_scale=meter)
    grower = growth and BatchGrowth(
        growth["policy"](),
        setup.batch,
        max_global_batch_size=LIMIT * problem.base_batch_size,
        decay_at_limit=growth.get("decay_at_limit", False),
    )
    accuracies, steps, curvature_s, started = [], [0], 0.0, time.perf_counter()
    draw = torch.Generator().manual_seed(seed)
    try:
        for _ in range(config["epochs"]):
            steps.append(steps[-1])
            for passes in setup.batches(torch.randperm(len(inputs), generator=draw)):
                for rows in passes:
                    setup.backward(F.cross_entropy(model(inputs[rows]), labels[rows]), samples=len(rows))
                setup.step()
                steps[-1] += 1
            accuracies.append(accuracy(model, held_out, answers))
            if grower:
                measure = None
                if growth["measure"] == "noise":
                    measure = setup.noise_scale.estimate()
                elif growth["measure"] == "curvature":
                    rows = torch.randperm(len(inputs), generator=draw)[:256]
                    began = time.perf_counter()
                    measure = largest_eigenvalue(
                        lambda rows=rows: F.cross_entropy(model(inputs[rows]), labels[rows]),
                        model.parameters(),
                    )
                    curvature_s += time.perf_counter() - began
                grower.update(measure)
    except HyperparameterError:  # It diverged: a gradient or a trust ratio is not finite.
        accuracies += [1 / problem.widths[-1]] * (config["epochs"] - len(accuracies))
    return {
        "accuracies": accuracies,
        "steps": steps[1:],
        "batch": setup.split.global_batch_size,
        "curvature_s": curvature_s,
        "seconds": time.perf_counter() - started,
    }


def tuned(problem: Problem) -> dict[str, float]:
    """Return the base rate of each optimiser with the best mean accuracy at 1x."""

    def score(kind: str, lr: float) -> float:
        config = {"optimizer": kind, "lr": lr, "global_batch_size": problem.base_batch_size}
        return statistics.mean(train(problem, config, seed)["accuracies"][-1] for seed in TUNING_SEEDS)

    return {kind: max(grid, key=lambda lr, kind=kind: score(kind, lr)) for kind, grid in GRIDS.items()}


def scaling(problem: Problem, rates: dict[str, float]) -> dict[str, dict[str, list[float]]]:
    """Return the last accuracies by way and factor, one per seed."""
    found: dict[str, dict[str, list[float]]] = {}
    for way, (warmup, kind, rule) in WAYS.items():
        found[way] = {}
        for factor in FACTORS:
            config = {
                "optimizer": kind,
                "lr": rates[kind],
                "scaling": rule,
                "warmup_epochs": warmup * problem.epochs,
                "global_batch_size": factor * problem.base_batch_size,
            }
            found[way][str(factor)] = [train(problem, config, seed)["accuracies"][-1] for seed in SEEDS]
            print(
                f"{problem.name:8} {way:28} {factor:3}x {statistics.mean(found[way][str(factor)]):.3f}",
                flush=True,
            )
    return found


def growing(
    problem: Problem, rate: float, seeds: Sequence[int], wanted: Sequence[str]
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield ways to grow, those in `wanted` or all, with epochs and steps to the targets by seed."""
    base = problem.base_batch_size
    shared = {"optimizer": "sgd", "lr": rate, "schedule": "constant", "epochs": 2 * problem.epochs}
    passes = {"max_micro_batch_size": base // 2}  # The noise scale needs two passes.
    milestones = [problem.epochs // 4 * number for number in (1, 2, 3, 4, 5)]
    small, large = {"global_batch_size": base, **passes}, {"global_batch_size": 8 * base, **passes}
    ways: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
        "fixed, 1x": (small, None),
        "fixed, 8x, linear scaling": (large, None),
        "doubled at fixed epochs, rate kept": (
            {**small, "scaling": "none"},
            {"policy": lambda: FixedGrowth(milestones), "measure": None, "decay_at_limit": True},
        ),
        "doubled at fixed epochs, rate scaled": (
            small,
            {"policy": lambda: FixedGrowth(milestones), "measure": None},
        ),
        "noise scale, rate scaled": (small, {"policy": NoiseScaleGrowth, "measure": "noise"}),
        "noise scale over more steps, rate scaled": (
            small,
            {"policy": NoiseScaleGrowth, "measure": "noise", "decay": LONG_DECAY},
        ),
        "curvature, rate scaled": (
            small,
            {"policy": lambda: CurvatureGrowth(duration=problem.epochs / 4), "measure": "curvature"},
        ),
    }
    for way in wanted or ways:
        config, growth = ways[way]
        found: list[dict[str, Any]] = []
        for seed in seeds:
            run = train(problem, {**shared, **config}, seed, growth)
            found.append(
                {
                    "reached": {
                        f"{target:g}": first_reached(run, target) for target in TARGETS[problem.name]
                    },
                    "last": run["accuracies"][-1],
                    "batch": run["batch"],
                    "curvature": run["curvature_s"] / run["seconds"],
                }
            )
            print(f"{problem.name:8} {way:38} seed {seed}: {found[-1]}", flush=True)
        yield way, found


def first_reached(run: dict[str, Any], target: float) -> dict[str, float]:
    """Return the epochs and steps after which the accuracy was first at the target, else infinity."""
    for number, (accurate, steps) in enumerate(zip(run["accuracies"], run["steps"], strict=False)):
        if accurate >= target:
            return {"epochs": number + 1, "steps": steps}
    return {"epochs": math.inf, "steps": math.inf}


def write(results: dict[str, Any]) -> None:
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=list(PROBLEMS))
    parser.add_argument("--parts", nargs="+", default=["rates", "scaling", "growing"])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), help="seeds of growing batches")
    parser.add_argument("--ways", nargs="+", default=[], help="ways to grow a batch; all by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in options.problems:
        problem = PROBLEMS[name]
        found = results.setdefault(name, {})
        if "rates" in options.parts:
            found["rates"] = tuned(problem)
        print(name, found["rates"], flush=True)
        if "scaling" in options.parts:
            found["scaling"] = scaling(problem, found["rates"])
        if "growing" in options.parts:
            for way, runs in growing(problem, found["rates"]["sgd"], options.seeds, options.ways):
                found.setdefault("growing", {})[way] = runs
                write(results)
        write(results)
    from large_batch_picture import draw

    draw(results, RESULTS.with_suffix(".png"))


if __name__ == "__main__":
    main()
