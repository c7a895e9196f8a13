"""Accuracy against the global batch after the same epochs, and steps to a target of batches that grow.

    OMP_NUM_THREADS=1 python -m benchmarks.large_batch                    # all: ten minutes
    OMP_NUM_THREADS=1 python -m benchmarks.large_batch --problems digits --seeds 0

One process computes the whole batch: N ranks with a part each do the same (tests/large_batch/test_worlds.py).
Base rates are the best of four at 1x, with other seeds; nothing is tuned at larger batches. Writes
results/large_batch.json and large_batch.png.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from horovod_tune import large_batch

RESULTS = Path(__file__).parent.parent / "results"
FACTORS, LIMIT = (1, 4, 16, 32), 32
# For each way: the fraction of the training that warms up, the optimiser and the scaling rule.
WAYS = {
    "SGD, rate unchanged": (0.0, "sgd", "none"),
    "linear scaling": (0.0, "sgd", "linear"),
    "linear scaling, warm-up": (0.2, "sgd", "linear"),
    "LARS, square root, warm-up": (0.2, "lars", "sqrt"),
    "LAMB, square root, warm-up": (0.2, "lamb", "sqrt"),
}


@dataclass(frozen=True)
class Problem:
    """Inputs and labels, of which the first `trained_on` are trained on, and a network's widths."""

    name: str
    inputs: torch.Tensor
    labels: torch.Tensor
    trained_on: int
    widths: tuple[int, ...]
    base_batch_size: int
    epochs: int
    rates: Mapping[str, float]
    # The accuracy to which steps are counted, which a growing batch reaches after it has grown.
    target: float

    def model(self, seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        pairs = zip(self.widths, self.widths[1:], strict=False)
        layers = [layer for pair in pairs for layer in (torch.nn.Linear(*pair), torch.nn.ReLU())]
        return torch.nn.Sequential(*layers[:-1])


def digits() -> Problem:
    """Return scikit-learn's digits and a network of one hidden layer."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    inputs = torch.tensor(images[order], dtype=torch.float32) / 16
    rates = {"sgd": 0.1, "lars": 0.2, "lamb": 0.02}
    return Problem("digits", inputs, torch.tensor(labels[order]), 1280, (64, 64, 10), 16, 12, rates, 0.975)


def spirals() -> Problem:
    """Return five arms of a spiral in the plane, which take many steps to learn."""
    draw = np.random.default_rng(0)
    arms = draw.integers(0, 5, 6144)
    radius = np.sqrt(draw.uniform(0.02, 1, 6144))
    angle = 2 * np.pi * arms / 5 + 5 * radius + draw.normal(0, 0.12, 6144)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1)
    inputs = torch.tensor(points, dtype=torch.float32)
    rates = {"sgd": 0.05, "lars": 0.2, "lamb": 0.005}
    return Problem("spirals", inputs, torch.tensor(arms), 4096, (2, 64, 64, 5), 32, 20, rates, 0.99)


def train(
    problem: Problem, seed: int, growth: tuple[Any, str, bool] | None = None, **config: Any
) -> dict[str, float]:
    """Train once; return the last accuracy, the epochs and steps to the target, and the last batch.

    `growth` is a policy, what it measures ("", "noise" or "curvature"), and `BatchGrowth`'s `decay_at_limit`.
    """
    model, samples = problem.model(seed), problem.trained_on
    meter = large_batch.NoiseScale(every=1) if growth else None
    config = {"epochs": problem.epochs, "base_batch_size": problem.base_batch_size, **config}
    setup = large_batch.from_config(model, config, num_samples=samples, noise_scale=meter)
    limit = LIMIT * problem.base_batch_size
    grower = growth and large_batch.BatchGrowth(
        growth[0], setup.batch, max_global_batch_size=limit, decay_at_limit=growth[2]
    )
    draw = torch.Generator().manual_seed(seed)
    steps, accuracy = 0, 1 / problem.widths[-1]
    reached = {"epochs": math.inf, "steps": math.inf}

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(problem.inputs[rows]), problem.labels[rows])

    try:
        for epoch in range(config["epochs"]):
            for passes in setup.batches(torch.randperm(samples, generator=draw)):
                for rows in passes:
                    setup.backward(loss(rows), samples=len(rows))
                setup.step()
                steps += 1
            with torch.no_grad():
                right = model(problem.inputs[samples:]).argmax(1) == problem.labels[samples:]
            accuracy = float(right.float().mean())
            if accuracy >= problem.target and math.isinf(reached["steps"]):
                reached = {"epochs": epoch + 1, "steps": steps}
            if grower and growth:
                measure: Any = setup.noise_scale.estimate() if growth[1] == "noise" else None
                if growth[1] == "curvature":
                    rows = torch.randperm(samples, generator=draw)[:256]
                    measure = large_batch.largest_eigenvalue(lambda rows=rows: loss(rows), model.parameters())
                grower.update(measure)
    except large_batch.HyperparameterError:  # It diverged: a gradient or a trust ratio is not finite.
        accuracy = 1 / problem.widths[-1]
    return {"last": accuracy, "batch": setup.split.global_batch_size, **reached}


def scaling(problem: Problem, seeds: Sequence[int]) -> dict[str, Any]:
    """Return the last accuracies by way and factor, one per seed."""
    accuracies: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    for way, (warmup, kind, rule) in WAYS.items():
        config = {
            "optimizer": kind,
            "lr": problem.rates[kind],
            "scaling": rule,
            "warmup_epochs": warmup * problem.epochs,
        }
        for factor in FACTORS:
            config["global_batch_size"] = factor * problem.base_batch_size
            values = [train(problem, seed, **config)["last"] for seed in seeds]
            accuracies[way][str(factor)] = values
            print(f"{problem.name:8} {way:28} {factor:3}x {statistics.mean(values):.3f}", flush=True)
    return accuracies


def growing(problem: Problem, seeds: Sequence[int]) -> dict[str, list[dict[str, float]]]:
    """Return what `train` does for each way to grow, one per seed, at a constant rate, twice the epochs."""
    base, quarter = problem.base_batch_size, problem.epochs // 4
    shared = {
        "optimizer": "sgd",
        "lr": problem.rates["sgd"],
        "schedule": "constant",
        "epochs": 2 * problem.epochs,
    }
    # The noise scale needs two passes.
    shared |= {"global_batch_size": base, "max_micro_batch_size": base // 2}
    milestones = [quarter * number for number in (1, 2, 3, 4, 5)]
    noise, curvature = large_batch.NoiseScaleGrowth, large_batch.CurvatureGrowth
    ways: dict[str, tuple[dict[str, Any], Any, str, bool]] = {
        "fixed, 1x": ({}, None, "", False),
        "fixed, 8x, linear scaling": ({"global_batch_size": 8 * base}, None, "", False),
        "doubled at fixed epochs, rate kept": (
            {"scaling": "none"}, lambda: large_batch.FixedGrowth(milestones), "", True,
        ),
        "doubled at fixed epochs, rate scaled": ({}, lambda: large_batch.FixedGrowth(milestones), "", False),
        "noise scale, rate scaled": ({}, noise, "noise", False),
        "curvature, rate scaled": ({}, lambda: curvature(duration=problem.epochs / 4), "curvature", False),
    }  # fmt: skip
    runs: dict[str, list[dict[str, float]]] = {}
    for way, (config, policy, measure, decays) in ways.items():
        for seed in seeds:
            growth = (policy(), measure, decays) if policy else None
            runs.setdefault(way, []).append(train(problem, seed, growth, **{**shared, **config}))
            print(f"{problem.name:8} {way:38} seed {seed}: {runs[way][-1]}", flush=True)
    return runs


def draw(results: dict[str, Any], path: Path) -> None:
    """Write one row of panels per problem: accuracy by batch, and steps to the target."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4 * len(results)), layout="tight")
    axes = figure.subplots(len(results), 2, squeeze=False)
    for (left, right), (name, measured) in zip(axes, results.items(), strict=True):
        for way, marker in zip(measured["scaling"], "osD^v", strict=True):
            means = [100 * statistics.mean(values) for values in measured["scaling"][way].values()]
            left.plot([f"{factor}x" for factor in measured["scaling"][way]], means, marker + "-", label=way)
        left.set(xlabel="global batch, at the same number of epochs", ylabel="accuracy in %", title=name)
        ways = measured["growing"]
        for place, runs in enumerate(ways.values()):
            steps = [run["steps"] for run in runs]
            last = 100 * statistics.median(run["last"] for run in runs)
            right.plot(steps, [place] * len(steps), ".", color="#30343a")
            text = f"{statistics.median(steps):g} steps; {last:.0f} % in the end"
            right.annotate(text, (1, place), xycoords=("axes fraction", "data"), ha="right", fontsize=8)
        right.set_yticks(range(len(ways)), ways)
        right.invert_yaxis()
        # The right half is for the text.
        reached = [run["steps"] for runs in ways.values() for run in runs if math.isfinite(run["steps"])]
        right.set(
            xlim=(0, 2.5 * max(reached, default=1)),
            xlabel=f"steps to {measured['target']:.1%}, a dot per seed",
        )
    axes[0][0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    problems = {problem.name: problem for problem in (digits(), spirals())}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=list(problems), choices=problems)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of large_batch.json and the picture")
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = options.folder / "large_batch.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for problem in (problems[name] for name in options.problems):
        results[problem.name] = {
            "target": problem.target,
            "scaling": scaling(problem, options.seeds),
            "growing": growing(problem, options.seeds),
        }
        path.write_text(json.dumps(results, indent=1) + "\n")
    draw(results, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
