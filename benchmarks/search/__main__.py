"""Compares BayesOptSearch with other searchers through Tune's searcher API. No cluster is needed.

    export OMP_NUM_THREADS=1
    python -m benchmarks.search functions --methods horovod_tune ax   # rows of results/search_functions.csv
    python -m benchmarks.search moved --seeds 22                      # rows of results/search_moved.csv
    python -m benchmarks.search options --seeds 20                    # rows of results/search_options.csv
    python -m benchmarks.search curves --model MODEL                  # rows of results/search_curves.csv
    python -m benchmarks.search speed                                 # milliseconds per suggestion
    python -m benchmarks.search report                                # the tables, and search_quality.png

Rows that a file has already are not measured again. On functions, 4 trials are in flight and end in a random
order; the regret is that of the point with the best observed value, without noise, divided by the median
regret of a random point; on options, `right` is 1 if that point has the best options. On curves (MODEL: see
curves.py) the regret is in percentage points of the error.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import logging
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pandas as pd
from ray.tune.search import Searcher

from benchmarks.search import curves
from benchmarks.search.functions import CHOSEN_ON, FUNCTIONS, MOVED, Problem, TrialFailed, moved
from benchmarks.search.options import CHECKED_ON, DEVELOPED_ON, OPTIONS, drawn
from benchmarks.search.searchers import SEARCHERS, RandomSearch, ours

RESULTS = Path(__file__).parent.parent / "results"
EVALUATIONS, IN_FLIGHT, MARKS = 40, 4, (10, 20, 40)


def search(problem: Problem, searcher: Searcher, seed: int) -> list[float]:
    """Run one search; return the regret after each of `MARKS` evaluations, in units of a random point's.

    For a problem of `options`, 1 or 0 follows for each of them: whether the options were the best ones.
    """
    generator, scale = np.random.default_rng([seed, 7]), random_regret(problem)
    if not searcher.set_search_properties("loss", "min", problem.space):
        raise RuntimeError("the searcher refused the space")
    live: list[tuple[float, int, dict]] = []
    best, regret, is_right, clock = float("inf"), float("inf"), False, 0.0
    regrets, rights = [], []
    for started in range(EVALUATIONS + IN_FLIGHT):
        if started >= IN_FLIGHT:
            clock, number, config = heapq.heappop(live)
            try:
                value = problem.observe(config, generator)
            except TrialFailed:
                searcher.on_trial_complete(f"t{number}", error=True)
            else:
                if value < best:
                    best, regret = value, problem.true_value(config) - problem.optimum
                    is_right = problem.is_right(config)
                result = {"loss": value, "training_iteration": 1}
                searcher.on_trial_result(f"t{number}", result)
                searcher.on_trial_complete(f"t{number}", result | {"done": True})
            regrets.append(regret / scale)
            rights.append(float(is_right))
        if started < EVALUATIONS:
            suggestion = searcher.suggest(f"t{started}")
            heapq.heappush(live, (clock + generator.lognormal(0, 0.5), started, suggestion))
    series = [regrets, rights] if problem.name in OPTIONS else [regrets]
    return [values[mark - 1] for values in series for mark in MARKS]


def random_regret(problem: Problem) -> float:
    """Return the median regret of a random point that does not fail."""
    draw, regrets = RandomSearch(0), []
    draw.set_search_properties("loss", "min", problem.space)
    for _ in range(1000):
        try:
            regrets.append(problem.true_value(draw.suggest("")) - problem.optimum)
        except TrialFailed:
            continue
    return float(np.median(regrets))


def add_rows(
    path: Path,
    columns: Iterable[str],
    runs: Iterable[tuple[str, str, int]],
    measure: Callable[[str, str, int], list[float]],
) -> None:
    """Append a row for each method, problem and seed that the file lacks, as soon as it is measured."""
    present = set()
    if path.exists():
        with path.open(newline="") as file:
            present = {(row["method"], row["problem"], int(row["seed"])) for row in csv.DictReader(file)}
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if not present:
            writer.writerow(["method", "problem", "seed", *columns])
        for run in runs:
            if run not in present:
                writer.writerow([*run, *(f"{value:.6g}" for value in measure(*run))])
                file.flush()


def speed(names: Iterable[str], repeats: int = 20) -> None:
    """Print CPU milliseconds of a suggestion, with its fit; 3 trials are in flight."""
    for problem in (FUNCTIONS[name] for name in names):
        for number in (100, 1000):
            searcher, draw, generator = ours(0), RandomSearch(1), np.random.default_rng(0)
            searcher.set_search_properties("loss", "min", problem.space)
            draw.set_search_properties("loss", "min", problem.space)
            for _ in range(number):
                config = draw.suggest("")
                searcher.add_evaluated_point(config, problem.observe(config, generator))
            live, taken = [(name, searcher.suggest(name)) for name in "abc"], []
            for repeat in range(repeats):
                before = time.process_time()
                live.append((f"t{repeat}", searcher.suggest(f"t{repeat}")))
                taken.append(1e3 * (time.process_time() - before))
                trial, config = live.pop(0)
                searcher.on_trial_complete(trial, {"loss": problem.observe(config, generator)})
            middle, high = np.quantile(taken, [0.5, 0.95])
            print(f"{problem.name}, {number} results: {middle:.0f} ms, 95 % within {high:.0f}")


def report(folder: Path) -> None:
    """Print the tables, and draw the medians of the functions."""
    pd.set_option("display.precision", 2)
    keys = ["method", "problem", "seed"]
    functions, on_moved, on_curves = (
        pd.read_csv(folder / f"search_{name}.csv").set_index(keys)
        for name in ("functions", "moved", "curves")
    )
    medians = functions["regret_40"].groupby(keys[:2]).median().unstack(0).loc[list(FUNCTIONS)]
    on_moved = on_moved.clip(lower=1e-6)
    ratios = np.log(on_moved.loc["horovod_tune"] / on_moved.loc["ax"]).dropna()
    ratios = pd.DataFrame({"mean": np.exp(ratios.mean()), "error of its logarithm": ratios.sem()})
    by_method = on_curves.groupby(keys[:2]).median().groupby("method").mean()
    print(f"{medians}\n\nmoved optima, geometric mean of the regrets as multiples of Ax's\n{ratios}")
    print(f"\nlearning curves\n{by_method}")
    for half in (DEVELOPED_ON, CHECKED_ON):
        print(f"\noptions: {', '.join(half)}\n{options_table(folder, half).to_string()}")
    draw_picture(medians, folder / "search_quality.png")


def options_table(folder: Path, half: Iterable[str]) -> pd.DataFrame:
    """Return by method the fewest seeds, mean regrets with standard errors, and the shares of `right`."""
    rows = pd.read_csv(folder / "search_options.csv")
    rows = rows[rows["problem"].isin(list(half))]
    regrets = rows.filter(like="regret_").groupby(rows["method"]).agg(["mean", "sem"])
    regrets.columns = [" ".join(names) for names in regrets.columns]
    matters = rows[rows["problem"] != "same"]
    shares = matters.filter(like="right_").groupby(matters["method"]).mean()
    seeds = rows.groupby(["method", "problem"]).size().groupby("method").min().rename("seeds")
    return pd.concat([seeds, regrets, shares], axis=1)


def draw_picture(medians: pd.DataFrame, path: Path) -> None:
    """Draw the median regret by function and method."""
    from matplotlib.figure import Figure

    styles = ("o#c1272d", "s#0072b2", "D#009e73", "v#8c8c8c", "|#000000")
    figure = Figure(figsize=(9, 6.2), layout="constrained")
    axes = figure.subplots()
    names, gap = list(FUNCTIONS), len(CHOSEN_ON)
    places = [-number - 0.8 * (number >= gap) for number in range(len(names))]
    # Ours last, so that it is on top.
    for method, style in reversed(list(zip(SEARCHERS, styles, strict=True))):
        if method in medians:
            values = medians.loc[names, method].clip(lower=1e-6)
            axes.plot(values, places, style[0], color=style[1:], label=method)
    axes.set(xscale="log", xlabel="median regret after 40 evaluations (1 = a random point); left is better")
    axes.set_yticks(places, names)
    axes.grid(axis="y", color="#e6e6e6")
    for title, place in (("chosen on these", places[0]), ("held out", places[gap])):
        axes.text(1.01, place, title, transform=axes.get_yaxis_transform(), rotation=-90, va="top")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.1), ncols=6, frameon=False, reverse=True)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    regrets = [f"regret_{mark}" for mark in MARKS]
    names = {
        "functions": (SEARCHERS, FUNCTIONS, regrets),
        "moved": (SEARCHERS, MOVED, regrets),
        "options": (SEARCHERS, OPTIONS, regrets + [f"right_{mark}" for mark in MARKS]),
        "curves": (curves.METHODS, [*map(str, curves.TASKS)], [f"regret_{t}" for t in curves.TRAININGS]),
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("command", choices=[*names, "speed", "report"])
    parser.add_argument("--model", type=Path, help="the ONNX file of the surrogate, for curves")
    parser.add_argument("--methods", nargs="+", default=["horovod_tune", "random"])
    parser.add_argument(
        "--problems", nargs="+", help="names of functions, or numbers of tasks; all by default"
    )
    parser.add_argument("--seeds", type=int, default=11)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the CSV files and the picture")
    chosen = parser.parse_args()
    if chosen.command == "speed":
        speed(chosen.problems or ("branin", "mixed_network", "levy10"))
    elif chosen.command == "report":
        report(chosen.folder)
    else:
        methods, problems, columns = names[chosen.command]
        for given, known in ((chosen.methods, methods), (chosen.problems or [], problems)):
            if unknown := set(given) - set(known):
                parser.error(f"{', '.join(sorted(unknown))} is not one of {', '.join(known)}")
        if chosen.command == "curves" and chosen.model is None:
            parser.error("curves needs --model, the ONNX file of the surrogate")

        def measure(method: str, problem: str, seed: int) -> list[float]:
            if chosen.command == "curves":
                return curves.simulate(curves.Task(chosen.model, int(problem)), curves.METHODS[method](seed))
            make = {"moved": moved, "options": drawn}.get(chosen.command, lambda name, _: FUNCTIONS[name])
            return search(make(problem, seed), SEARCHERS[method](seed), seed)

        seeds = range(chosen.seeds)
        runs = [(m, p, seed) for seed in seeds for p in chosen.problems or problems for m in chosen.methods]
        add_rows(chosen.folder / f"search_{chosen.command}.csv", columns, runs, measure)


if __name__ == "__main__":
    main()
