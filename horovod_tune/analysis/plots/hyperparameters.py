"""The metric over the space: parallel coordinates, single hyperparameters, pairs of them, importances."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..importance import METHOD, TooFewTrials, best_or_last, design, importances
from ..parameters import Parameter, text_of, varying_parameters
from ..results import Analysis
from . import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _values(analysis: Analysis) -> np.ndarray:
    return np.array([best_or_last(analysis, index) for index in range(len(analysis.trials))])


def _named(analysis: Analysis, name: str) -> Parameter:
    found = varying_parameters(analysis)
    for one in found:
        if one.name == name:
            return one
    known = ", ".join(one.name for one in found) or "none"
    raise ValueError(f"no hyperparameter {name!r} varies among the trials; those that do: {known}")


def _spread(parameter: Parameter, seed: int = 0) -> np.ndarray:
    """Positions, with categories' points moved apart a little so that they do not hide each other."""
    if parameter.kind != "category":
        return parameter.positions
    return parameter.positions + np.random.default_rng(seed).uniform(-0.18, 0.18, len(parameter.values))


def _axis_of(ax: Axes, parameter: Parameter, which: str) -> None:
    axis = ax.xaxis if which == "x" else ax.yaxis
    (ax.set_xlabel if which == "x" else ax.set_ylabel)(parameter.name)
    low, high = parameter.limits()
    if parameter.kind == "category":
        texts = [text if len(text) <= 14 else text[:13] + "…" for text in parameter.categories]
        axis.set_ticks(range(len(texts)), texts)
        if which == "x" and sum(map(len, texts)) > 40:
            ax.tick_params(axis="x", labelrotation=35)
    else:
        pad = 0.03 * (high - low)
        low, high = low - pad, high + pad
        if parameter.log:
            marks = log_ticks(low, high)
            axis.set_ticks([math.log10(mark) for mark in marks], [f"{mark:g}" for mark in marks])
    (ax.set_xlim if which == "x" else ax.set_ylim)(low, high)


def log_ticks(low: float, high: float) -> list[float]:
    """Round marks between two powers of ten: whole decades, or 1, 2, 5 where there are few.

    >>> log_ticks(-3.2, 0.1)
    [0.001, 0.01, 0.1, 1.0]
    """
    decades = range(math.floor(low), math.ceil(high) + 1)
    every = max(1, round(len(decades) / 6))
    marks = [10.0**decade for decade in decades if low <= decade <= high and decade % every == 0]
    if len(marks) < 2:
        marks = [m * 10.0**d for d in decades for m in (1, 2, 5) if low <= math.log10(m) + d <= high]
    return marks


def parameter(analysis: Analysis, name: str, ax: Axes | None = None) -> Axes:
    """Draw the metric against one hyperparameter, a point a trial; a log-scaled one on a log axis.

    Raises `ValueError` where that hyperparameter does not vary.
    """
    metric, mode = analysis.require_metric()
    one, values = _named(analysis, name), _values(analysis)
    ax = style.axes(ax, 4.6, 3.6)
    size = float(np.clip(900 / max(len(values), 1), 5, 34))
    ax.scatter(_spread(one), values, s=size, color=style.OKABE_ITO[0], alpha=0.55, linewidths=0, zorder=3)
    if one.kind == "category":
        for rank in range(len(one.categories)):
            inside = values[(one.positions == rank) & np.isfinite(values)]
            if len(inside):
                ax.hlines(np.median(inside), rank - 0.3, rank + 0.3, color="#20242A", linewidth=2, zorder=4)
    if analysis.has_best:
        best = analysis.trials.index(analysis.best_trial)
        ax.plot(
            _spread(one)[best], values[best], "*", color=style.BEST, markersize=13, zorder=6, label="best"
        )
    _axis_of(ax, one, "x")
    outside = style.metric_axis(ax, values[np.isfinite(values)], mode)
    ax.set_ylabel(metric)
    style.title(ax, name, outside or ("bars: medians" if one.kind == "category" else ""))
    return ax


def parameters(analysis: Analysis) -> Any:
    """Draw the metric against each hyperparameter; returns an array of Axes, one for each."""
    found = varying_parameters(analysis)
    if not found:
        raise ValueError("no hyperparameter varies among the trials")
    across = min(3, len(found))
    down = math.ceil(len(found) / across)
    figure, grid = style.pyplot().subplots(
        down, across, figsize=(4.2 * across, 3.2 * down), layout="constrained", squeeze=False
    )
    for ax, one in zip(grid.flat, found, strict=False):
        parameter(analysis, one.name, ax)
    for ax in grid.flat[len(found) :]:
        figure.delaxes(ax)
    return grid.flatten()[: len(found)]


def interaction(
    analysis: Analysis, x: str | None = None, y: str | None = None, ax: Axes | None = None
) -> Axes:
    """Draw two hyperparameters against each other, trials coloured by the metric, darkest best.

    The ground is what a random forest (scikit-learn) expects there, averaged over the trials' other
    hyperparameters (partial dependence; Friedman, 2001); it is left out with fewer than 10 trials. Without
    names the two most important hyperparameters are taken.
    """
    metric, mode = analysis.require_metric()
    if x is None or y is None:
        ranked = _ranked(analysis)
        rest = [name for name in ranked if name not in (x, y)]
        x, y = x or rest.pop(0), y or rest.pop(0)
    one, two, values = _named(analysis, x), _named(analysis, y), _values(analysis)
    ax = style.axes(ax, 5.6, 4.4)
    known = np.isfinite(values)
    norm, shades = style.shade(values, mode)
    ax.grid(False)
    _axis_of(ax, one, "x")
    _axis_of(ax, two, "y")
    ground = _ground(ax, analysis, one, two, norm, shades)
    size = float(np.clip(1500 / max(len(values), 1), 6, 44))
    drawn = ax.scatter(
        _spread(one)[known],
        _spread(two, 1)[known],
        c=values[known],
        norm=norm,
        cmap=shades,
        s=size,
        zorder=3,
        edgecolors="white",
        linewidths=0.5 if size > 12 else 0.2,
    )
    bar = ax.figure.colorbar(drawn, ax=ax, pad=0.02, aspect=30)
    bar.set_label(metric, fontsize=9)
    bar.outline.set_visible(False)
    said = "ground: a random forest's expectation" if ground else "darkest is best"
    style.title(ax, f"{x} and {y}", said)
    return ax


def _ranked(analysis: Analysis) -> list[str]:
    try:
        names = list(importances(analysis).names)
    except TooFewTrials:
        names = [one.name for one in varying_parameters(analysis)]
    if len(names) < 2:
        raise ValueError(f"an interaction needs two hyperparameters that vary; there are {len(names)}")
    return names


def _ground(ax: Axes, analysis: Analysis, one: Parameter, two: Parameter, norm: Any, shades: Any) -> bool:
    from sklearn.ensemble import RandomForestRegressor

    found, features, target = design(analysis)
    if len(target) < 10:
        return False
    names = [parameter.name for parameter in found]
    target = np.clip(target, norm.vmin, norm.vmax)  # diverged trials would hide everything else
    forest = RandomForestRegressor(60, min_samples_leaf=2, random_state=0, n_jobs=1).fit(features, target)
    columns = (names.index(one.name), names.index(two.name))
    xs, ys = (_grid(parameter) for parameter in (one, two))
    sample = features[np.random.default_rng(0).choice(len(features), min(60, len(features)), replace=False)]
    points = np.repeat(sample[None, :, :], len(xs) * len(ys), axis=0)
    points[:, :, columns[0]] = np.repeat(xs, len(ys))[:, None]
    points[:, :, columns[1]] = np.tile(ys, len(xs))[:, None]
    expected = (
        forest.predict(points.reshape(-1, features.shape[1])).reshape(len(xs), len(ys), -1).mean(axis=2)
    )
    ax.pcolormesh(xs, ys, expected.T, norm=norm, cmap=shades, alpha=0.45, shading="nearest", zorder=1)
    return True


def _grid(parameter: Parameter) -> np.ndarray:
    if parameter.kind == "category":
        return np.arange(len(parameter.categories), dtype=float)
    low, high = parameter.limits()
    pad = 0.03 * (high - low)
    return np.linspace(low - pad, high + pad, 25)


def importance(analysis: Analysis, ax: Axes | None = None) -> Axes:
    """Draw how much each hyperparameter matters: permutation importance on a random forest (scikit-learn).

    Bars are the drop of R² on held-out trials when a hyperparameter's values are shuffled, with the standard
    deviation. With too few trials the axes say so. See `horovod_tune.analysis.importance`.
    """
    ax = style.axes(ax, 6.4, 3.6)
    try:
        found = importances(analysis)
    except TooFewTrials as error:
        style.say_empty(ax, str(error))
        return ax
    places = np.arange(len(found.names))[::-1]
    drop = np.maximum(found.drop, 0.0)
    ax.barh(places, drop, color=style.OKABE_ITO[0], height=0.62)
    ax.errorbar(drop, places, xerr=found.spread, fmt="none", ecolor="#20242A", elinewidth=1, capsize=2)
    ax.set_yticks(places, found.names)
    ax.grid(axis="y", visible=False)
    ax.set_xlim(left=0)
    ax.set_xlabel("drop of R² when shuffled")
    trust = f"the model's R² on held-out trials: {found.r2:.2f}"
    if found.r2 < 0.2:
        trust += "; too low to trust these bars"
    style.title(ax, "Importance of hyperparameters", f"{METHOD}; {trust}")
    return ax


def parallel_coordinates(analysis: Analysis, ax: Axes | None = None) -> Axes:
    """Draw every trial as a line over one axis a hyperparameter, and the metric at the right.

    Axes are logarithmic where the space is, categories have a place each. Lines are coloured by the metric,
    the best darkest and drawn last, the best trial in orange.
    """
    from matplotlib.collections import LineCollection

    metric, mode = analysis.require_metric()
    found, values = varying_parameters(analysis), _values(analysis)
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
    ax.set_xticks(range(len(heights)), [*(one.name for one in found), metric], fontsize=9)
    for place, one in enumerate(found):
        _rule(ax, place, _marks(one))
    _rule(
        ax, len(found), [((v - norm.vmin) / (norm.vmax - norm.vmin), f"{v:.3g}") for v in _round_marks(norm)]
    )
    style.title(ax, "Parallel coordinates", f"{len(known)} trials · darkest is best · orange: the best")
    return ax


def _height(parameter: Parameter) -> np.ndarray:
    low, high = parameter.limits()
    return (_spread(parameter) - low) / (high - low)


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
