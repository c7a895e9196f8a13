"""Compares BayesOptSearch with its peers through Tune's searcher API: simple regret after 40 evaluations.

Mostly 4 are in flight. No cluster is needed; trials are functions of `search_problems.py` and end in a random
order.

    python research/search_quality.py run --methods horovod_tune random     # rows for search_quality.csv
    python research/search_quality.py report                                # the table and the picture
    python research/search_quality.py intervals --output FILE               # intervals of the medians

The peers need packages of their own; without its package, a peer raises an ImportError:

    pip install optuna==5.0.0 hyperopt==0.3.0 ax-platform==1.3.1
    pip install bayesian-optimization==1.4.3     # for ray_bayesopt, in an environment of its own

`run` skips what the CSV has already. Regret is that of the point with the best observed value, without
noise, divided by the median regret of a random point; times are per suggestion. One core is enough: set
OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import heapq
import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from ray.tune.search import ConcurrencyLimiter, Searcher
from result_rows import ResultRows
from search_problems import AS_WRITTEN, CHOSEN_ON, HELD_OUT, PROBLEMS, Problem, TrialFailed

RESULTS = Path(__file__).parent / "results" / "search_quality.csv"
PICTURE = Path(__file__).parent / "results" / "search_quality.png"
EVALUATIONS = 40
MARKS = (10, 20, 30, 40)
FIELDS = [
    "method",
    "problem",
    "seed",
    *(f"regret_{m}" for m in MARKS),
    "evaluations",
    "p50_ms",
    "p95_ms",
    "note",
]


class RandomSearch(Searcher):
    """Draws from Tune's domains."""

    def __init__(self, seed: int) -> None:
        super().__init__(metric="loss", mode="min")
        self._generator = np.random.default_rng(seed)

    def set_search_properties(self, metric: Any, mode: Any, config: dict, **spec: Any) -> bool:
        self._space = config
        return True

    def _draw(self, space: Any) -> Any:
        if isinstance(space, dict):
            return {key: self._draw(value) for key, value in space.items()}
        return space.sample(random_state=self._generator)

    def suggest(self, trial_id: str) -> dict:
        return self._draw(self._space)

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        pass


class PlainBayesianOptimization(RandomSearch):
    """bayesian-optimization 3.x by itself, in parallel as in its documentation: UCB in a ConstantLiar."""

    def set_search_properties(self, metric: Any, mode: Any, config: dict, **spec: Any) -> bool:
        from bayes_opt import BayesianOptimization, acquisition
        from ray.tune.search.sample import Categorical, Integer
        from ray.tune.utils import flatten_dict

        bounds = {}
        for name, domain in flatten_dict(config).items():
            if isinstance(domain, Categorical):
                bounds[name] = tuple(domain.categories)
            else:
                bounds[name] = (
                    (domain.lower, domain.upper - 1, int)
                    if isinstance(domain, Integer)
                    else (
                        domain.lower,
                        domain.upper,
                    )
                )
        self._space = config
        seed = int(self._generator.integers(2**31))
        liar = acquisition.ConstantLiar(acquisition.UpperConfidenceBound())
        self._optimizer = BayesianOptimization(
            None, bounds, acquisition_function=liar, random_state=seed, verbose=0, allow_duplicate_points=True
        )
        self._live: dict[str, dict] = {}
        self._started = 0
        return True

    def suggest(self, trial_id: str) -> dict:
        from ray.tune.utils import flatten_dict
        from ray.tune.utils.util import unflatten_dict

        self._started += 1
        if self._started <= 10 or not len(self._optimizer.space):
            point = flatten_dict(self._draw(self._space))
        else:
            point = self._optimizer.suggest()
        self._live[trial_id] = point
        config = {k: v.item() if isinstance(v, np.generic) else v for k, v in point.items()}
        return unflatten_dict(config)

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        point = self._live.pop(trial_id)
        if not error and result:
            self._optimizer.register(point, -result["loss"])


def _ours(seed: int) -> Searcher:
    from horovod_tune.search import BayesOptSearch

    return BayesOptSearch(metric="loss", mode="min", random_state=seed)


def _hyperopt(seed: int) -> Searcher:
    from ray.tune.search.hyperopt import HyperOptSearch

    return HyperOptSearch(metric="loss", mode="min", random_state_seed=seed, n_initial_points=10)


def _optuna(kind: str) -> Callable[[int], Searcher]:
    def make(seed: int) -> Searcher:
        import optuna
        from ray.tune.search.optuna import OptunaSearch

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        sampler = {
            "tpe": lambda: optuna.samplers.TPESampler(seed=seed, constant_liar=True, multivariate=True),
            "gp": lambda: optuna.samplers.GPSampler(seed=seed),
        }[kind]()
        return OptunaSearch(metric="loss", mode="min", sampler=sampler)

    return make


def _ax(seed: int) -> Searcher:
    from search_ax import AxClientSearch

    return AxClientSearch(seed)


def _ray_bayesopt(seed: int) -> Searcher:
    from ray.tune.search.bayesopt import BayesOptSearch

    return BayesOptSearch(metric="loss", mode="min", random_state=seed)


METHODS: dict[str, Callable[[int], Searcher]] = {
    "horovod_tune": _ours,
    "random": RandomSearch,
    "hyperopt_tpe": _hyperopt,
    "optuna_tpe": _optuna("tpe"),
    "optuna_gp": _optuna("gp"),
    "ax": _ax,
    "bayes_opt": PlainBayesianOptimization,
    "ray_bayesopt": _ray_bayesopt,
}


def search(problem: Problem, make: Callable[[int], Searcher], seed: int, nested: bool) -> dict[str, Any]:
    """Run one search; regrets are in the problem's own units.

    Without `nested` the searcher gets a space without domains inside a choice.
    """
    generator = np.random.default_rng([seed, 7])
    searcher = ConcurrencyLimiter(make(seed), max_concurrent=problem.in_flight)
    space = problem.space() if nested else _flat_space(problem)
    if not searcher.set_search_properties("loss", "min", space):
        raise RuntimeError("the searcher refused the space")
    live: list[tuple[float, int, str, dict]] = []
    times: list[float] = []
    best_observed, regret, regrets = float("inf"), float("inf"), []
    clock, started, waits = 0.0, 0, 0
    while started < EVALUATIONS or live:
        config: Any = None
        if len(live) < problem.in_flight and started < EVALUATIONS:
            before = time.perf_counter()
            config = searcher.suggest(f"t{started}")
            times.append(time.perf_counter() - before)
            if config == Searcher.FINISHED:
                started, config = EVALUATIONS, None
            elif config is not None:
                heapq.heappush(live, (clock + generator.lognormal(0, 0.5), started, f"t{started}", config))
                started, waits = started + 1, 0
                continue
        if not live:
            waits += 1
            if waits > 50:  # it neither suggests nor ends
                break
            continue
        clock, _, trial_id, config = heapq.heappop(live)
        try:
            value = problem.observe(config, generator)
        except TrialFailed:
            searcher.on_trial_complete(trial_id, error=True)
        else:
            if value < best_observed:
                best_observed, regret = value, problem.true_value(config) - problem.optimum
            searcher.on_trial_result(trial_id, {"loss": value, "training_iteration": 1})
            searcher.on_trial_complete(trial_id, {"loss": value, "training_iteration": 1, "done": True})
        regrets.append(regret)
    row = {f"regret_{m}": regrets[min(m, len(regrets)) - 1] if regrets else float("nan") for m in MARKS}
    return row | {
        "evaluations": len(regrets),
        "p50_ms": 1e3 * float(np.median(times)),
        "p95_ms": 1e3 * float(np.quantile(times, 0.95)),
    }


def _flat_space(problem: Problem) -> dict[str, Any]:
    return (problem.flat_space or problem.space)()


def random_regret(problem: Problem) -> float:
    """Return the median regret of a random point that does not fail, the unit of all regrets."""
    draw = RandomSearch(0)
    draw.set_search_properties("loss", "min", _flat_space(problem))
    regrets = []
    for _ in range(1000):
        try:
            regrets.append(problem.true_value(draw.suggest("")) - problem.optimum)
        except TrialFailed:
            continue
    return float(np.median(regrets))


def run(methods: list[str], problems: list[str], seeds: int, output: Path) -> None:
    rows = ResultRows(output, FIELDS, keys=3)
    for seed in range(seeds):
        for method in methods:
            for name in problems:
                if rows.has(method, name, seed):
                    continue
                row = measured(PROBLEMS[name], method, seed)
                rows.add(row)
                print(method, name, seed, row.get("regret_40"), row["note"], flush=True)


def measured(problem: Problem, method: str, seed: int) -> dict[str, Any]:
    """Run one search; return its row, with regrets in units of a random point's."""
    unit = random_regret(problem)
    identity = {"method": method, "problem": problem.name, "seed": seed}
    try:
        found = search(problem, METHODS[method], seed, nested=method == "horovod_tune")
    except ImportError:
        raise
    except Exception as error:  # a peer that cannot search this space is a result
        return identity | {"note": f"{type(error).__name__}: {str(error)[:80]}".replace("\n", " ")}
    for mark in MARKS:
        found[f"regret_{mark}"] = f"{found[f'regret_{mark}'] / unit:.6g}"
    for key in ("p50_ms", "p95_ms"):
        found[key] = f"{found[key]:.1f}"
    return identity | found | {"note": ""}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run")
    runner.add_argument("--methods", nargs="+", default=["horovod_tune", "random"], choices=METHODS)
    runner.add_argument("--problems", nargs="+", default=list(PROBLEMS), choices=PROBLEMS)
    runner.add_argument("--seeds", type=int, default=11)
    for command in (runner, commands.add_parser("report"), commands.add_parser("intervals")):
        command.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.command == "run":
        run(arguments.methods, arguments.problems, arguments.seeds, arguments.output)
    elif arguments.command == "intervals":
        from search_report import intervals

        intervals(arguments.output)
    else:
        from search_report import at_marks, report

        report(arguments.output, PICTURE, [p.name for p in CHOSEN_ON], [p.name for p in HELD_OUT])
        print()
        at_marks(arguments.output, [p.name for p in AS_WRITTEN], (10, 20, 40))


if __name__ == "__main__":
    main()
