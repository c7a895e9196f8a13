"""Draws what `large_batch_accuracy.py` found: accuracy against batch, and steps to a target."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = ("#30343a", "#d95f02", "#e6ab02", "#1f77b4", "#1b9e77")
MARKERS = ("o", "s", "D", "^", "v")


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Write one row of panels per problem: accuracy by batch, and epochs and steps to the target."""
    figure, axes = plt.subplots(len(results), 2, figsize=(11, 4 * len(results)), squeeze=False)
    for row, (name, found) in zip(axes, results.items(), strict=True):
        for axis, part in zip(row, ("scaling", "growing"), strict=True):
            axis.set_visible(part in found)
        if "scaling" in found:
            _scaling(row[0], name, found["scaling"])
        if "growing" in found:
            _growing(row[1], name, found["growing"])
    axes[0][0].legend(fontsize=8, loc="lower left", frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _scaling(axis: Any, name: str, found: Mapping[str, Mapping[str, list[float]]]) -> None:
    for number, (way, by_factor) in enumerate(found.items()):
        places = [index + 0.06 * (number - 2) for index in range(len(by_factor))]
        means = [statistics.mean(values) for values in by_factor.values()]
        colour = COLOURS[number]
        axis.plot(places, means, color=colour, marker=MARKERS[number], markersize=5, label=way)
        for place, values in zip(places, by_factor.values(), strict=True):
            axis.plot([place, place], [min(values), max(values)], color=colour, linewidth=1, alpha=0.6)
    axis.set_xticks(range(len(by_factor)), [f"{factor}x" for factor in by_factor])
    axis.set_xlabel("global batch, at the same number of epochs", fontsize=9)
    axis.set_ylabel("accuracy on held-out data", fontsize=9)
    axis.set_title(f"{name}: mean of {len(values)} seeds, lines from worst to best", fontsize=10, loc="left")
    _plain(axis)


def _growing(axis: Any, name: str, found: Mapping[str, list[Mapping[str, Any]]]) -> None:
    target = list(found["fixed, 1x"][0]["reached"])[-1]
    ways = {way: [run["reached"][target] for run in runs] for way, runs in found.items()}
    for number, (way, runs) in enumerate(ways.items()):
        steps = statistics.median(run["steps"] for run in runs)
        epochs = statistics.median(run["epochs"] for run in runs)
        reached = [run["steps"] for run in runs if math.isfinite(run["steps"])]
        axis.plot(reached, [-number] * len(reached), ".", color="#30343a", markersize=5)
        last = 100 * statistics.median(run["last"] for run in found[way])
        text = f"{epochs:g} epochs, {steps:.0f} steps" if math.isfinite(steps) else "not reached"
        text += f"; {last:.0f} % in the end"
        if math.isfinite(steps):
            axis.plot(steps, -number, "|", color="#d95f02", markersize=16, markeredgewidth=2)
        axis.annotate(
            text, (1, -number), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8
        )
    axis.set_yticks([-number for number in range(len(found))], list(found), fontsize=8)
    # The right half is for the text.
    steps = [run["steps"] for runs in ways.values() for run in runs if math.isfinite(run["steps"])]
    axis.set_xlim(0, 2.5 * max(steps, default=1))
    axis.margins(y=0.15)
    axis.set_xlabel("optimiser steps to the target, a dot per seed; median marked", fontsize=9)
    axis.set_title(f"{name}: batches that grow, to an accuracy of {target}", fontsize=10, loc="left")
    _plain(axis)


def _plain(axis: Any) -> None:
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
