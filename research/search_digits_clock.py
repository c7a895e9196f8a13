"""The trials of `search_digits.py` without a cluster: one process trains, and the clock is simulated.

    python research/search_digits_clock.py run --seeds 16      # rows for the CSV
    python research/search_digits_clock.py report

Curves of real trainings are noisy, unlike those of LCBench's surrogate. This measures within seconds, and so
over many seeds, the epochs that a search needs until a trial classifies 97, 98 or 98.5 % of the held-out
digits correctly. The space, the rungs and the budget are those of `search_digits.py`. Searches end at 98.5 %,
or after as many epochs as 20 whole trainings have.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lcbench_clock import Search, simulate
from lcbench_tune import TuneSearch
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import Searcher
from result_rows import ResultRows
from search_digits import AT_ONCE, EPOCHS, GOAL, SPACE, TRAININGS, tpe
from search_quality import RandomSearch
from sklearn.datasets import load_digits

from horovod_tune.search import BayesOptSearch, PromotingASHA

RESULTS = Path(__file__).parent / "results" / "search_digits_clock.csv"
#: Accuracies on the held-out digits; the epochs of all trials are recorded when each is reached.
GOALS = (0.97, 0.98, GOAL)
FIELDS = ["method", "seed", *(f"epochs_{100 * goal:g}" for goal in GOALS), "trials", "best"]


class GoalReached(Exception):
    """A trial has reached an accuracy of 98.5 %."""


class Digits:
    """Handwritten digits; counts the epochs of all trials, and remembers the best."""

    best_error = 0.0

    def __init__(self) -> None:
        pixels, digits = load_digits(return_X_y=True)
        order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
        self.images = torch.tensor(pixels, dtype=torch.float32)[order] / 16
        self.answers = torch.tensor(digits)[order]
        self.epochs, self.best, self.trials = 0, 0.0, 0
        self.epochs_to: dict[float, int] = {}

    def curve(self, config: dict[str, Any]) -> tuple[np.ndarray, float]:
        """Return a trial's errors, each of which is trained for on access, and the seconds of an epoch."""
        self.trials += 1
        errors: Any = Errors(self, config)
        return errors, 1.0 + 64 / config["batch_size"] + 1e-3 * self.trials

    def note(self, accuracy: float) -> None:
        self.epochs, self.best = self.epochs + 1, max(self.best, accuracy)
        for goal in GOALS:
            if self.best >= goal:
                self.epochs_to.setdefault(goal, self.epochs)
        if self.best >= GOAL:
            raise GoalReached


class Errors:
    """The errors of a trial after its epochs, to be read in order."""

    def __init__(self, digits: Digits, config: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self._digits, self._batch_size = digits, config["batch_size"]
        self._model = torch.nn.Sequential(
            torch.nn.Linear(64, config["width"]),
            torch.nn.ReLU(),
            torch.nn.Dropout(config["dropout"]),
            torch.nn.Linear(config["width"], 10),
        )
        self._optimizer = torch.optim.SGD(
            self._model.parameters(), config["lr"], config["momentum"], weight_decay=config["weight_decay"]
        )
        self._random = torch.get_rng_state()

    def __getitem__(self, epoch: int) -> float:
        images, answers = self._digits.images, self._digits.answers
        torch.set_rng_state(self._random)
        self._model.train()
        shuffled = torch.randperm(1280, generator=torch.Generator().manual_seed(epoch + 1))
        for batch in shuffled.split(self._batch_size):
            self._optimizer.zero_grad()
            F.cross_entropy(self._model(images[batch]), answers[batch]).backward()
            self._optimizer.step()
        self._random = torch.get_rng_state()
        self._model.eval()
        with torch.no_grad():
            right = (self._model(images[1280:]).argmax(1) == answers[1280:]).float().mean().item()
        self._digits.note(right)
        return 100.0 * (1.0 - right)


def _bayesian(seed: int) -> Searcher:
    return BayesOptSearch(metric="loss", mode="min", random_state=seed)


def _tpe(seed: int) -> Searcher:
    return tpe(seed, metric="loss", mode="min")


METHODS: dict[str, tuple[Callable[[int], Searcher], Any]] = {
    "horovod_tune_promoting": (_bayesian, PromotingASHA),
    "horovod_tune": (_bayesian, ASHAScheduler),
    "optuna_tpe": (_tpe, ASHAScheduler),
    "random_promoting": (RandomSearch, PromotingASHA),
    "random": (RandomSearch, ASHAScheduler),
}


def search(method: str, seed: int) -> dict[str, Any]:
    """Run one search; return its row's figures."""
    digits, (searcher, scheduler) = Digits(), METHODS[method]
    tuned: Search = TuneSearch(searcher(seed), scheduler, SPACE, EPOCHS)
    with contextlib.suppress(GoalReached):
        simulate(digits, tuned, workers=AT_ONCE, epochs=EPOCHS, trainings=(TRAININGS,))
    epochs = {f"epochs_{100 * goal:g}": digits.epochs_to.get(goal, "") for goal in GOALS}
    return epochs | {"trials": digits.trials, "best": f"{digits.best:.4f}"}


def run(methods: list[str], seeds: int, output: Path) -> None:
    rows = ResultRows(output, FIELDS, keys=2)
    for seed in range(seeds):
        for method in methods:
            if not rows.has(method, seed):
                rows.add({"method": method, "seed": seed} | search(method, seed))


def report(output: Path) -> None:
    """Print medians and quartiles over the seeds; a search that misses the goal counts as infinite."""
    import pandas as pd

    rows = pd.read_csv(output)
    print("| method | seeds | " + " | ".join(f"{100 * goal:g} %" for goal in GOALS) + " | got there |")
    print("|" + "---|" * (len(GOALS) + 3))
    for method, part in rows.groupby("method", sort=False):
        cells = []
        for goal in GOALS:
            epochs = part[f"epochs_{100 * goal:g}"].fillna(float("inf"))
            low, middle, high = (epochs.quantile(q, interpolation="nearest") for q in (0.25, 0.5, 0.75))
            cells.append(f"{middle:.0f} ({low:.0f} to {high:.0f})".replace("inf", "more"))
        reached = (part["best"] >= GOAL).sum()
        print(f"| {method} | {len(part)} | {' | '.join(cells)} | {reached} |")


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    runner.add_argument("--seeds", type=int, default=11)
    for command in (runner, commands.add_parser("report")):
        command.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.methods, arguments.seeds, arguments.output)
    else:
        report(arguments.output)


if __name__ == "__main__":
    main()
