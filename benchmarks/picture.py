"""Draws the results: one panel per part, every run as a dot, the median as a bar."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib import ticker

from benchmarks.parts import OURS, PARTS
from benchmarks.tables import short

OURS_COLOUR, OTHER_COLOUR, DOT_COLOUR = "#1f77b4", "#b8bcc2", "#30343a"
SHOWN = (
    *("turnaround", "concurrent", "first_trial", "world_8", "world_16", "training", "reports", "exploit"),
    *("resize", "loss"),
)
LOGARITHMIC = ("turnaround", "exploit", "loss")


def draw(results: Mapping[str, Mapping[str, list[dict[str, float]]]], path: Path) -> None:
    """Write one picture of all parts that were measured; nothing if none was."""
    names = [name for name in SHOWN if name in results]
    if not names:
        return
    columns = 2
    rows = -(-len(names) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(11, 1.9 * rows), squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        _panel(axis, name, results[name])
    for axis in list(axes.flat)[len(names) :]:
        axis.axis("off")
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _panel(axis: Any, name: str, figures: Mapping[str, list[dict[str, float]]]) -> None:
    part = PARTS[name]
    ways = list(figures)
    for place, way in enumerate(ways):
        values = [row[part.figure] for row in figures[way]]
        median = statistics.median(values)
        axis.barh(place, median, color=OURS_COLOUR if way.startswith(OURS) else OTHER_COLOUR, height=0.65)
        axis.plot(values, [place] * len(values), ".", color=DOT_COLOUR, markersize=4)
        axis.annotate(
            short(median),
            (max(values), place),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axis.set_yticks(range(len(ways)), ways, fontsize=8)
    axis.invert_yaxis()
    if name in LOGARITHMIC:
        axis.set_xscale("log")
        axis.set_xlim(left=min(row[part.figure] for rows in figures.values() for row in rows) / 3)
        axis.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    axis.margins(x=0.15)
    better = "less is better" if part.lower_is_better else "more is better"
    title, _, detail = part.question.partition(": ")
    axis.set_title(title, fontsize=9, loc="left")
    axis.set_xlabel(f"{detail or part.unit} ({better})", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
