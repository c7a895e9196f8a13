"""The table and the picture of `search_quality.py`."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np

#: The number of seeds used of each method, although some methods have more.
SEEDS = 11

#: Methods in the order of the table, with their marks in the picture.
STYLE = {
    "horovod_tune": ("o", "#c1272d", 70),
    "ax": ("s", "#0072b2", 34),
    "optuna_gp": ("D", "#009e73", 34),
    "optuna_tpe": ("v", "#8c8c8c", 30),
    "hyperopt_tpe": ("^", "#8c8c8c", 30),
    "bayes_opt": ("P", "#e69f00", 34),
    "ray_bayesopt": ("X", "#cc79a7", 34),
    "random": ("|", "#000000", 60),
}


def report(results: Path, picture: Path, chosen_on: list[str], held_out: list[str]) -> None:
    """Print median regrets and times by problem and method, and draw them to `picture`."""
    with results.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["seed"]) < SEEDS]
    regrets: dict[tuple[str, str], list[float]] = defaultdict(list)
    times: dict[str, list[float]] = defaultdict(list)
    refused: set[tuple[str, str]] = set()
    for row in rows:
        key = (row["problem"], row["method"])
        if row["regret_40"]:
            regrets[key].append(float(row["regret_40"]))
            times[row["method"]].append(float(row["p95_ms"]))
        else:
            refused.add(key)
    methods = [method for method in STYLE if any(method == key[1] for key in {*regrets, *refused})]
    medians = {key: float(np.median(values)) for key, values in regrets.items()}
    print("| function | " + " | ".join(methods) + " |")
    print("|---" * (len(methods) + 1) + "|")
    for title, names in (("chosen on these", chosen_on), ("held out", held_out)):
        print(f"| *{title}* |" + " |" * len(methods))
        for name in names:
            cells = [_cell(medians, regrets, refused, name, method) for method in methods]
            print(f"| {name} | " + " | ".join(cells) + " |")
    typical = [f"{np.median(times[m]):.0f}" if times[m] else "" for m in methods]
    print("| ms a suggestion, 95th percentile | " + " | ".join(typical) + " |")
    _draw(medians, methods, chosen_on, held_out, picture)


def at_marks(results: Path, problems: list[str], marks: tuple[int, ...]) -> None:
    """Print the median regrets over all seeds after each of `marks` evaluations, by problem and method."""
    regrets: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    with results.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["regret_40"]:
                for mark in marks:
                    regrets[row["problem"], row["method"], mark].append(float(row[f"regret_{mark}"]))
    methods = [method for method in STYLE if any(method == key[1] and key[0] in problems for key in regrets)]
    print("| function | after | " + " | ".join(methods) + " |\n|" + "---|" * (len(methods) + 2))
    for name in problems:
        for mark in marks:
            medians = {
                m: float(np.median(regrets[name, m, mark])) for m in methods if (name, m, mark) in regrets
            }
            best = 1.001 * min(medians.values(), default=0.0)
            cells = [
                ""
                if m not in medians
                else f"**{medians[m]:.2g}**"
                if medians[m] <= best
                else f"{medians[m]:.2g}"
                for m in methods
            ]
            print(f"| {name if mark == marks[0] else ''} | {mark} | " + " | ".join(cells) + " |")


def intervals(results: Path) -> None:
    """Print median regrets over all seeds in `results`, with 95 % intervals: 10,000 bootstrap samples."""
    regrets: dict[tuple[str, str], list[float]] = defaultdict(list)
    with results.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["regret_40"]:
                regrets[row["problem"], row["method"]].append(float(row["regret_40"]))
    print("| function | method | seeds | median | 95 % interval | mean |\n" + "|---" * 6 + "|")
    generator = np.random.default_rng(0)
    for (problem, method), values in regrets.items():
        samples = np.median(generator.choice(values, (10_000, len(values))), axis=1)
        low, high = np.quantile(samples, [0.025, 0.975])
        middle, mean = np.median(values), np.mean(values)
        print(
            f"| {problem} | {method} | {len(values)} | {middle:.2g} | {low:.2g} to {high:.2g} | {mean:.2g} |"
        )


def _cell(
    medians: dict[tuple[str, str], float],
    regrets: dict[tuple[str, str], list[float]],
    refused: set[tuple[str, str]],
    problem: str,
    method: str,
) -> str:
    key = (problem, method)
    if key not in medians:
        return "refuses" if key in refused else ""
    mark = "" if len(regrets[key]) >= SEEDS else f" ({len(regrets[key])})"
    best = medians[key] <= 1.001 * min(v for (name, _), v in medians.items() if name == problem)
    text = f"{medians[key]:.2g}"
    return (f"**{text}**" if best else text) + mark


def _draw(
    medians: dict[tuple[str, str], float],
    methods: list[str],
    chosen_on: list[str],
    held_out: list[str],
    picture: Path,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    problems = [*chosen_on, *held_out]
    rows = {name: -i - (0.8 if name in held_out else 0.0) for i, name in enumerate(problems)}
    figure, axes = plt.subplots(figsize=(9, 6.2), constrained_layout=True)
    for y in rows.values():
        axes.axhline(y, color="#e6e6e6", linewidth=0.8, zorder=0)
    # Ours last, so that it is on top.
    for method in [*methods[1:], methods[0]]:
        marker, colour, size = STYLE[method]
        points = [
            (max(medians[name, method], 1e-6), rows[name]) for name in problems if (name, method) in medians
        ]
        axes.scatter(*zip(*points, strict=True), marker=marker, c=colour, s=size, label=method, zorder=2)
    axes.set_xscale("log")
    axes.set_yticks(list(rows.values()), list(rows))
    axes.set_xlabel("median regret after 40 evaluations, 4 in flight (1 = a random point); left is better")
    for title, names in (("chosen on these", chosen_on), ("held out", held_out)):
        axes.text(1.01, rows[names[0]], title, transform=axes.get_yaxis_transform(), rotation=-90, va="top")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, 1.1), ncols=4, frameon=False)
    picture.parent.mkdir(exist_ok=True)
    figure.savefig(picture, dpi=130)
    print(f"\n{picture}")
