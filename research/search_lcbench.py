"""Compares searchers under ASHA on LCBench's learning curves: regret after 5, 10 and 20 trainings' epochs.

    python research/search_lcbench.py run MODEL --methods horovod_tune random     # rows for the CSV
    python research/search_lcbench.py report
    python research/search_lcbench.py run MODEL --log-decay               # weight_decay on a log scale
    python research/search_lcbench.py least MODEL --epochs 16 32          # the least possible regret

MODEL is the path of the surrogate, see `lcbench.py`. No cluster is needed: Tune's own ASHA (grace period 2,
reduction factor 3, 52 epochs), our PromotingASHA (`_promoting`), or a peer's scheduler with the same rungs
controls 4 workers whose clock is simulated; the surrogate predicts how long an epoch takes. Regret is in
percentage points of the validation error: the smallest error reported so far, less the smallest of the task.
One core is enough: set OMP_NUM_THREADS=1. The peers run in environments of their own, without Ray:
`lcbench_syne_tune.py`, `lcbench_smac.py` and `lcbench_neps.py` list what to install.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from lcbench import EPOCHS, LOGARITHMIC, TASKS, Task
from lcbench_clock import TRAININGS, Search, simulate
from result_rows import ResultRows

RESULTS = Path(__file__).parent / "results" / "search_lcbench.csv"
LOG_DECAY_RESULTS = RESULTS.with_name("search_lcbench_log_decay.csv")
FIELDS = [
    "method",
    "task",
    "workers",
    "seed",
    *(f"regret_{t}" for t in TRAININGS),
    "trials",
    "p50_ms",
    "p95_ms",
]


def _ours(seed: int) -> Search:
    from lcbench_tune import TuneSearch

    from horovod_tune.search import BayesOptSearch

    return TuneSearch(BayesOptSearch(metric="loss", mode="min", random_state=seed))


def _ours_promoting(seed: int) -> Search:
    from lcbench_tune import TuneSearch

    from horovod_tune.search import BayesOptSearch, PromotingASHA

    return TuneSearch(BayesOptSearch(metric="loss", mode="min", random_state=seed), PromotingASHA)


def _ours_promoting_max_t(seed: int) -> Search:
    from lcbench_tune import TuneSearch

    from horovod_tune.search import BayesOptSearch, PromotingASHA

    search = BayesOptSearch(metric="loss", mode="min", random_state=seed, max_t=EPOCHS)
    return TuneSearch(search, PromotingASHA)


def _random(seed: int) -> Search:
    from lcbench_tune import TuneSearch
    from search_quality import RandomSearch

    return TuneSearch(RandomSearch(seed))


def _random_promoting(seed: int) -> Search:
    from lcbench_tune import TuneSearch
    from search_quality import RandomSearch

    from horovod_tune.search import PromotingASHA

    return TuneSearch(RandomSearch(seed), PromotingASHA)


def _tpe(seed: int) -> Search:
    import optuna
    from lcbench_tune import TuneSearch
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True, multivariate=True)
    return TuneSearch(OptunaSearch(metric="loss", mode="min", sampler=sampler))


def _syne_tune(method: str) -> Callable[[int], Search]:
    def make(seed: int) -> Search:
        from lcbench_syne_tune import SyneTuneSearch

        return SyneTuneSearch(method, seed)

    return make


def _smac(seed: int) -> Search:
    from lcbench_budgets import BudgetSearch
    from lcbench_smac import SmacPeer

    return BudgetSearch(SmacPeer(seed))


def _neps(method: str) -> Callable[[int], Search]:
    def make(seed: int) -> Search:
        from lcbench_budgets import BudgetSearch
        from lcbench_neps import NepsPeer

        return BudgetSearch(NepsPeer(method, seed))

    return make


METHODS: dict[str, Callable[[int], Search]] = {
    "horovod_tune": _ours,
    "horovod_tune_promoting": _ours_promoting,
    "horovod_tune_promoting_max_t": _ours_promoting_max_t,
    "random": _random,
    "random_promoting": _random_promoting,
    "optuna_tpe": _tpe,
    "mobster": _syne_tune("mobster"),
    "mobster_promotion": _syne_tune("mobster_promotion"),
    "mobster_warped": _syne_tune("mobster_warped"),
    "hyper_tune": _syne_tune("hyper_tune"),
    "hyper_tune_promotion": _syne_tune("hyper_tune_promotion"),
    "syne_tune_asha": _syne_tune("syne_tune_asha"),
    "syne_tune_bohb": _syne_tune("syne_tune_bohb"),
    "smac": _smac,
    "neps_priorband": _neps("neps_priorband"),
    "neps_priorband_gp": _neps("neps_priorband_gp"),
}


def search(task: Task, make: Callable[[int], Search], seed: int, workers: int) -> dict[str, Any]:
    """Run one search until the largest budget of epochs is used up; return its row's figures."""
    outcome = simulate(task, make(seed), workers=workers, epochs=EPOCHS)
    p50, p95 = 1e3 * np.quantile(outcome.suggestion_seconds, [0.5, 0.95])
    regrets = {f"regret_{t}": f"{regret:.4f}" for t, regret in zip(TRAININGS, outcome.regrets, strict=True)}
    return regrets | {"trials": outcome.trials, "p50_ms": f"{p50:.1f}", "p95_ms": f"{p95:.1f}"}


def run(model: Path, methods: list[str], tasks: list[int], seeds: int, workers: int, output: Path) -> None:
    rows = ResultRows(output, FIELDS, keys=4)
    loaded = {task: Task(model, task) for task in tasks}
    for seed in range(seeds):
        for task in tasks:
            for method in methods:
                if not rows.has(method, task, workers, seed):
                    row = search(loaded[task], METHODS[method], seed, workers)
                    rows.add({"method": method, "task": task, "workers": workers, "seed": seed} | row)


def least(model: Path, epochs: list[int]) -> None:
    """Print the smallest regret of any configuration after each of `epochs`, the mean over the tasks."""
    tasks = [Task(model, task) for task in TASKS]
    for epoch in epochs:
        print(
            epoch, round(float(np.mean([task.least_error([epoch]) - task.best_error for task in tasks])), 2)
        )


def report(output: Path) -> None:
    """Print, by method, the means over the tasks of the regret's median and quartiles over the seeds."""
    import pandas as pd

    rows = pd.read_csv(output)
    print("| method | workers | tasks | seeds | " + " | ".join(f"{t} trainings" for t in TRAININGS) + " |")
    print("|---" * (4 + len(TRAININGS)) + "|")
    for (workers, method), part in rows.groupby(["workers", "method"]):
        cells = []
        for trainings in TRAININGS:
            by_task = part.groupby("task")[f"regret_{trainings}"]
            low, middle, high = (float(by_task.quantile(q).mean()) for q in (0.25, 0.5, 0.75))
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        seeds = part.groupby("task").size()
        print(f"| {method} | {workers} | {len(seeds)} | {seeds.min()} | " + " | ".join(cells) + " |")


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("model", type=Path)
    runner.add_argument("--methods", nargs="+", default=["horovod_tune", "random"], choices=METHODS)
    runner.add_argument("--tasks", nargs="+", type=int, default=list(TASKS), choices=TASKS)
    runner.add_argument("--seeds", type=int, default=11)
    runner.add_argument("--workers", type=int, default=4)
    finder = commands.add_parser("least")
    finder.add_argument("model", type=Path)
    finder.add_argument("--epochs", nargs="+", type=int, default=[16, 32], metavar="EPOCH")
    for command in (runner, finder, commands.add_parser("report")):
        command.add_argument("--log-decay", action="store_true", help="search weight_decay on a log scale")
        command.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if arguments.log_decay:
        LOGARITHMIC.add("weight_decay")
    output = arguments.output or (LOG_DECAY_RESULTS if arguments.log_decay else RESULTS)
    if arguments.command == "run":
        run(
            arguments.model,
            arguments.methods,
            arguments.tasks,
            arguments.seeds,
            arguments.workers,
            output,
        )
    elif arguments.command == "least":
        least(arguments.model, arguments.epochs)
    else:
        report(output)


if __name__ == "__main__":
    main()
