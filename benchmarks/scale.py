"""Worlds of up to 512 ranks against the real rendezvous and the real coordinator, without 512 processes.

    python -m benchmarks.scale                    # 16 to 512 ranks: half a minute
    python -m benchmarks.scale --sizes 16,64      # some
    python -m benchmarks.scale --before           # also without our patch: 2 minutes
    python -m benchmarks.scale picture            # draw results/scale.csv again

Two cores simulate 8 ranks per host: `scale_rendezvous.py` and `scale_reports.py` describe what is real.
Results go to results/scale.csv and scale.png. With ``--before``, each pair of ranks also sends requests to
the rendezvous, as Horovod does without our patch (up to 256 ranks: more take many minutes).
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import scale_rendezvous

RESULTS = Path(__file__).resolve().parent / "results"
SIZES = (16, 64, 128, 256, 512)
LARGEST_OF_PAIRS = 256
SECONDS = 5.0
TIMEOUT_S = 600
FIELDS = ("part", "way", "ranks", "figure", "value")
# On two cores, at 512 ranks.
RENDEZVOUS_CPU_S, REPORTS_PER_S = 5.0, 10.0


def measure(sizes: Sequence[int], *, before: bool) -> list[tuple[str, str, int, str, float]]:
    rows = []

    def note(part: str, way: str, ranks: int, figures: dict[str, float]) -> None:
        text = ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
        print(f"{part:10} {way:8} {ranks:4} ranks: {text}", flush=True)
        rows.extend((part, way, ranks, name, value) for name, value in figures.items())

    for size in sizes:
        note("rendezvous", "gathers", size, scale_rendezvous.measure(size, gathers=True))
        if before and size <= LARGEST_OF_PAIRS:
            note("rendezvous", "pairs", size, scale_rendezvous.measure(size, gathers=False))
        note("reports", "ray", size, _reports("ray", size))
    return rows


def _reports(way: str, size: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.scale_reports", way, str(size), str(SECONDS)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=TIMEOUT_S)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def write(rows: Sequence[tuple[str, str, int, str, float]], path: Path) -> None:
    """Add the rows to the file; they replace those of the same part, way and number of ranks."""
    kept = {}
    if path.exists():
        with path.open() as file:
            for row in csv.DictReader(file):
                kept[row["part"], row["way"], int(row["ranks"]), row["figure"]] = float(row["value"])
    kept |= {row[:4]: row[4] for row in rows}
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(FIELDS)
        writer.writerows((*name, f"{value:.6g}") for name, value in sorted(kept.items()))


def draw(source: Path, path: Path) -> None:
    """Draw the CPU time of the rendezvous and of a report by the number of ranks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with source.open() as file:
        rows = list(csv.DictReader(file))
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6))
    panels = (
        ("rendezvous", "cpu_s", "CPU seconds of the rendezvous", RENDEZVOUS_CPU_S, "goal: 5 s at 512"),
        (
            "reports",
            "cpu_ms_per_report",
            "coordinator's CPU, ms per report",
            1000 / REPORTS_PER_S,
            "goal: 10 reports per second",
        ),
    )
    names = {
        "gathers": "one exchange",
        "pairs": "one request per pair",
        "ray": "a Ray call per rank on another host",
    }
    for axis, (part, name, label, goal, goal_label) in zip(axes, panels, strict=True):
        for way in dict.fromkeys(row["way"] for row in rows if row["part"] == part):
            points = sorted(
                (int(row["ranks"]), float(row["value"]))
                for row in rows
                if (row["part"], row["way"], row["figure"]) == (part, way, name)
            )
            color = "#b8bcc2" if way == "pairs" else "#1f77b4"
            axis.plot(*zip(*points, strict=True), "o-", label=names[way], color=color)
        axis.axhline(goal, color="#30343a", linewidth=0.8, linestyle=":", label=goal_label)
        axis.set(xscale="log", yscale="log", xlabel="ranks, 8 per host", ylabel=label)
        axis.set_xticks(SIZES, [str(size) for size in SIZES])
        axis.minorticks_off()
        axis.legend(frameon=False, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="?", choices=["measure", "picture"], default="measure")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="default: %(default)s")
    parser.add_argument("--before", action="store_true", help="also measure without our patch")
    arguments = parser.parse_args()
    results = RESULTS / "scale.csv"
    if arguments.what == "measure":
        sizes = [int(size) for size in arguments.sizes.split(",")]
        write(measure(sizes, before=arguments.before), results)
    draw(results, RESULTS / "scale.png")


if __name__ == "__main__":
    main()
