"""Measures what a user loses without each trick, in programs that take turns.

    python -m benchmarks.ablation                       # everything: an hour on 2 cores
    python -m benchmarks.ablation channel allocator     # some tricks
    python -m benchmarks.ablation --runs 1              # one round
    python -m benchmarks.ablation --horovod "patched waits"=FOLDER   # a Horovod built without them, in FOLDER

In each round every program runs once as it is and once without each trick, so that other work on the machine
affects all of them; each ratio is one of two runs in the same round. Results go to results/ablation.csv and
replace those of the same tricks. Differences of less than a tenth (0.91 to 1.1) are marked.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import machine
from benchmarks.__main__ import RESULTS, ROOT, run_program
from benchmarks.without.sitecustomize import TRICKS

HOOK = Path(__file__).resolve().parent / "without"
RESULTS_FILE = RESULTS / "ablation.csv"
FIELDS = ("figure", "without", "run", "with_it", "without_it", "times_as_good")


@dataclass(frozen=True)
class Figure:
    """One figure of a program. ``sign`` is 1 if more is better, -1 if less is."""

    command: str
    name: str
    sign: int


FIGURES = {
    "first trial": Figure("first_trial ours", "first_trial_s", -1),
    "40 trials": Figure("ours turnaround --trials 40", "trial_mean_s", -1),
    "a warm trial": Figure("ours turnaround --trials 40", "trial_s", -1),
    "four at a time": Figure("ours concurrent --trials 16", "efficiency", 1),
    "reports, 2 ranks": Figure("reports ours --ranks 2", "reports_per_s", 1),
    "reports, 16 ranks": Figure("reports ours --ranks 16", "reports_per_s", 1),
    "steps": Figure("training ours", "steps_per_s", 1),
    "init of 16 ranks": Figure("world ours 16", "init_s", -1),
}


@dataclass(frozen=True)
class Trick:
    """A trick, the figures that may suffer without it, and the environment variables to take it out."""

    text: str
    figures: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


_STARTS = ("first trial", "40 trials", "four at a time")
ABLATIONS = {
    "idle_processes": Trick("coordinators start in processes that Ray keeps ready", _STARTS),
    "warm_workers": Trick("workers are kept for the next trial", ("40 trials", "four at a time")),
    "early_reset": Trick("the reset begins while Tune handles the result", ("a warm trial",)),
    "channel": Trick(
        "reports through sockets", ("reports, 2 ranks", "reports, 16 ranks", "a warm trial", "40 trials")
    ),
    "allocator": Trick("ranks keep the memory that a step frees", ("steps",)),
}
_OF_HOROVOD = ("first trial", "a warm trial", "reports, 16 ranks", "steps", "init of 16 ranks")


def measure(tricks: Mapping[str, Trick], runs: int) -> list[dict[str, str]]:
    rows = []
    for run in range(1, runs + 1):
        for command in dict.fromkeys(figure.command for figure in FIGURES.values()):
            names = [name for name, figure in FIGURES.items() if figure.command == command]
            concerned = {key: trick for key, trick in tricks.items() if set(trick.figures) & set(names)}
            if not concerned:
                continue
            whole = run_without(command, "", {})
            for key, trick in concerned.items():
                less = run_without(command, key, trick.environment)
                for name in sorted(set(names) & set(trick.figures)):
                    one, other = whole[FIGURES[name].name], less[FIGURES[name].name]
                    good = (one / other) ** FIGURES[name].sign
                    cells = (name, key, str(run), f"{one:.4g}", f"{other:.4g}", f"{good:.4g}")
                    print(f"{run}: {name} without {key}: {other:.4g}, with it {one:.4g}", flush=True)
                    rows.append(dict(zip(FIELDS, cells, strict=True)))
    return rows


def run_without(command: str, key: str, environment: Mapping[str, str]) -> dict[str, float]:
    """Run a program without a trick, and check that the trick was taken out."""
    before = dict(os.environ)
    with tempfile.NamedTemporaryFile("r") as note:
        os.environ.update(environment)
        if key in TRICKS:
            os.environ.update(ABLATION=key, ABLATION_NOTE=note.name)
        path = environment.get("PYTHONPATH")
        try:
            figures = run_program(command, [str(HOOK), str(ROOT), *([path] if path else [])])
        finally:
            os.environ.clear()
            os.environ.update(before)
        if key in TRICKS and not note.read():
            raise RuntimeError(f"{command} ran with {key}: its module was never imported")
    return figures


def table(tricks: Mapping[str, Trick], rows: list[dict[str, str]]) -> str:
    """Return the table of docs/benchmarks.md: how many times as good each figure is with the trick."""
    lines = ["| trick | figure | with it, times as good | |", "|---|---|---|---|"]
    for key, trick in tricks.items():
        for name in trick.figures:
            ratios = [
                float(row["times_as_good"]) for row in rows if (row["without"], row["figure"]) == (key, name)
            ]
            if not ratios:
                continue
            ratio = statistics.median(ratios)
            verdict = "less than a tenth" if 1 / 1.1 < ratio < 1.1 else ""
            spread = f"{ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            lines.append(f"| {trick.text} | {name} | {spread} | {verdict} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ablation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tricks", nargs="*", metavar="trick", help=f"one of {', '.join(ABLATIONS)}")
    parser.add_argument("--runs", type=int, default=5, help="rounds (default 5)")
    parser.add_argument("--horovod", action="append", default=[], metavar="NAME=FOLDER")
    options = parser.parse_args()
    unknown = set(options.tricks) - set(ABLATIONS)
    if unknown:
        parser.error(f"there is no trick {', '.join(sorted(unknown))}")
    if options.runs < 1:
        parser.error(f"--runs must be at least 1, got {options.runs}")
    tricks = {key: ABLATIONS[key] for key in options.tricks or ABLATIONS}
    for each in options.horovod:
        name, separator, folder = each.partition("=")
        if not separator or not Path(folder, "horovod").is_dir():
            parser.error(f"--horovod takes NAME=FOLDER with a folder horovod in it, got {each!r}")
        tricks[name] = Trick(f"Horovod's patches: {name}", _OF_HOROVOD, {"PYTHONPATH": folder})
    for name, value in machine.describe().items():
        print(f"{name}: {value}")
    rows = [row for row in read_results() if row["without"] not in tricks]
    rows += measure(tricks, options.runs)
    with RESULTS_FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"\n{table({**ABLATIONS, **tricks}, rows)}")


def read_results() -> list[dict[str, str]]:
    if not RESULTS_FILE.exists():
        return []
    with RESULTS_FILE.open(newline="") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
