"""Parallel coordinates: every trial as a line over the hyperparameters and the metric."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_tune.analysis.plots import style
from horovod_tune.analysis.plots.parameter_axes import log_ticks, spread, trial_values
from horovod_tune.analysis.results import Analysis
from horovod_tune.analysis.varying_parameters import Parameter, text_of, varying_parameters

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def parallel_coordinates(analysis: Analysis, ax: Axes | None = None) -> Axes:
    """Draw every trial as a line over one axis a hyperparameter, and the metric at the right.

    Axes are logarithmic where the space is, categories have a place each. Lines are coloured by the metric,
    the best darkest and drawn last, the best trial in orange.
    """
    from matplotlib.collections import LineCollection

    metric, mode = analysis.require_metric()
    found, values = varying_parameters(analysis), trial_values(analysis)
    ax = style.axes(ax, max(7.2, 1.5 * (len(found) + 1)), 4.4)
    known = np.flatnonzero(np.isfinite(values))
    if not found or not len(known):
        style.say_empty(ax, "no hyperparameter varies" if not found else f"no trial has a finite {metric}")
        return ax
    norm, shades = style.shade(values, mode)
    heights = [_height(one) for one in found] + [
        np.clip((values - norm.vmin) / (norm.vmax - norm.vmin), 0, 1)
    ]
    lines = np.stack([np.column_stack([np.arange(len(heights)), [h[i] for h in heights]]) for i in known])
    order = np.argsort(-values[known] if mode == "min" else values[known])
    alpha = float(np.clip(120 / len(known), 0.08, 0.8))
    ax.add_collection(
        LineCollection(
            list(lines[order]),
            colors=shades(norm(values[known][order])),
            linewidths=1.0 if len(known) > 30 else 1.6,
            alpha=alpha,
        )
    )
    if analysis.has_best:
        best = analysis.trials.index(analysis.best_trial)
        ax.plot(range(len(heights)), [h[best] for h in heights], color=style.BEST, linewidth=2.4, zorder=5)
    ax.set_xlim(-0.25, len(heights) - 0.6)
    ax.set_ylim(-0.04, 1.04)
    ax.set_yticks([])
    ax.grid(False)
    ax.spines[:].set_visible(False)
    names = [style.words(name) for name in (*(one.name for one in found), metric)]
    ax.set_xticks(range(len(heights)), names, fontsize=9)
    for place, one in enumerate(found):
        _rule(ax, place, _marks(one))
    _rule(
        ax, len(found), [((v - norm.vmin) / (norm.vmax - norm.vmin), f"{v:.3g}") for v in _round_marks(norm)]
    )
    style.title(ax, "Parallel coordinates", f"{len(known)} trials · darkest is best · orange: the best")
    return ax


def _height(parameter: Parameter) -> np.ndarray:
    low, high = parameter.limits()
    return (spread(parameter) - low) / (high - low)


def _marks(parameter: Parameter) -> list[tuple[float, str]]:
    low, high = parameter.limits()
    if parameter.kind == "category":
        texts = parameter.categories
        every = max(1, math.ceil(len(texts) / 12))
        return [
            ((rank - low) / (high - low), text[:14]) for rank, text in enumerate(texts) if rank % every == 0
        ]
    if parameter.log:
        return [((math.log10(mark) - low) / (high - low), f"{mark:g}") for mark in log_ticks(low, high)]
    ends = (low, (low + high) / 2, high)
    labels = [text_of(round(mark) if parameter.integer else float(f"{mark:.3g}")) for mark in ends]
    return [((mark - low) / (high - low), text) for mark, text in zip(ends, labels, strict=True)]


def _round_marks(norm: Any) -> list[float]:
    from matplotlib.ticker import MaxNLocator

    return [v for v in MaxNLocator(5).tick_values(norm.vmin, norm.vmax) if norm.vmin <= v <= norm.vmax]


def _rule(ax: Axes, place: int, marks: list[tuple[float, str]]) -> None:
    ax.axvline(place, color="#5B616A", linewidth=1, zorder=4)
    for height, text in marks:
        ax.annotate(
            text,
            (place, height),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=8,
            va="center",
            zorder=6,
            bbox={"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none", "alpha": 0.75},
        )
