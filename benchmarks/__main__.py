"""Measures what the README claims, in programs that take turns.

    python -m benchmarks                      # everything: about an hour
    python -m benchmarks turnaround reports   # some parts, shown only
    python -m benchmarks --runs 1 --quick     # without the slow peers, shown only
    python -m benchmarks picture              # picture and tables of results/speed.csv again

Every program of a part runs once in each round, so that other work on the machine affects all of them;
ratios are taken within a round. The results of everything, which are of one commit, go to
results/speed.csv, speed_machine.txt, speed.png, README.md and docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import machine
from benchmarks.parts import EXECUTOR, PARTS, RUN, TRAIN, Figures, Part, judge

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
TIMEOUT_S = 1800
FIELDS = ("part", "way", "run", "figure", "value")


def run_program(command: str, path: Sequence[str] = (str(ROOT),)) -> dict[str, float]:
    """Run one program in a process of its own, with ``path`` for Python's modules; return its figures."""
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file, tempfile.TemporaryFile("w+") as output:
        environment = {
            **os.environ,
            "BENCHMARK_RESULT": file.name,
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "RAY_AIR_NEW_OUTPUT": "0",
            # Ray lowers the priority of its workers, which would then wait for any other work on the machine.
            "RAY_worker_niceness": "0",
        }
        done = subprocess.run(
            [sys.executable, "-m", *f"benchmarks.programs.{command}".split()],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT_S,
        )
        if done.returncode:
            output.seek(0)
            raise RuntimeError(f"{command} failed:\n{output.read()[-4000:]}")
        return json.load(file)


def measure(name: str, part: Part, runs: int, quick: bool) -> Figures:
    ways = {way: each for way, each in part.ways.items() if not (quick and way in (EXECUTOR, RUN, TRAIN))}
    figures: Figures = {way: [] for way in ways}
    for run in range(part.runs or runs):
        for way, command in ways.items():
            figures[way].append(run_program(command))
            value = figures[way][-1].get(part.figure, float("nan"))
            print(f"{name} {run + 1}: {way}: {value:.4g} {part.unit}", flush=True)
    return figures


def show(part: Part, figures: Figures) -> None:
    print(f"\n{part.question}")
    for way, rows in figures.items():
        values = [row[part.figure] for row in rows]
        median, low, high = statistics.median(values), min(values), max(values)
        print(f"  {way:32} {median:9.4g} {part.unit}   ({low:.4g} to {high:.4g}, {len(values)} runs)")
    for line in judge(part, figures):
        print(f"  {line}")
    print(flush=True)


def read_results() -> dict[str, Figures]:
    results: dict[str, Figures] = {}
    path = RESULTS / "speed.csv"
    if not path.exists():
        return results
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            rows = results.setdefault(row["part"], {}).setdefault(row["way"], [])
            while len(rows) < int(row["run"]):
                rows.append({})
            rows[int(row["run"]) - 1][row["figure"]] = float(row["value"])
    return results


def write_results(results: Mapping[str, Figures]) -> None:
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "speed.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        for name in (each for each in PARTS if each in results):
            for way, rows in results[name].items():
                for run, row in enumerate(rows, start=1):
                    writer.writerows([name, way, run, figure, f"{row[figure]:.6g}"] for figure in row)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=f"one of {', '.join(PARTS)}, picture")
    parser.add_argument("--runs", type=int, default=5, help="rounds of each part (default 5)")
    parser.add_argument("--quick", action="store_true", help="leave out the peers that take minutes")
    options = parser.parse_args()
    unknown = set(options.parts) - set(PARTS) - {"picture"}
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}, picture")
    if options.runs < 1:
        parser.error(f"--runs must be at least 1, got {options.runs}")
    if options.parts != ["picture"]:
        facts = "\n".join(f"{name}: {value}" for name, value in machine.describe().items())
        print(facts + "\n", flush=True)
        results: dict[str, Figures] = {}
        for name in (part for part in options.parts or PARTS if part != "picture"):
            results[name] = measure(name, PARTS[name], options.runs, options.quick)
            show(PARTS[name], results[name])
        if options.parts or options.quick:
            return
        write_results(results)
        (RESULTS / "speed_machine.txt").write_text(facts + "\n")
    from benchmarks import picture, tables

    picture.draw(read_results(), RESULTS / "speed.png")
    tables.write(read_results())


if __name__ == "__main__":
    main()
