"""The metric over the space: single hyperparameters, pairs of them, importances."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_tune.analysis.importance import METHOD, TooFewTrials, design, importances
from horovod_tune.analysis.plots import style
from horovod_tune.analysis.plots.parameter_axes import log_ticks, spread, trial_values
from horovod_tune.analysis.results import Analysis
from horovod_tune.analysis.varying_parameters import Parameter, varying_parameters

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _named(analysis: Analysis, name: str) -> Parameter:
    found = varying_parameters(analysis)
    for one in found:
        if one.name == name:
            return one
    known = ", ".join(one.name for one in found) or "none"
    raise ValueError(f"no hyperparameter {name!r} varies among the trials; those that do: {known}")


def _axis_of(ax: Axes, parameter: Parameter, which: str) -> None:
    axis = ax.xaxis if which == "x" else ax.yaxis
    (ax.set_xlabel if which == "x" else ax.set_ylabel)(parameter.name)
    low, high = parameter.limits()
    if parameter.kind == "category":
        texts = [text if len(text) <= 14 else text[:13] + "…" for text in parameter.categories]
        axis.set_ticks(range(len(texts)), [style.words(text) for text in texts])
        if which == "x" and sum(map(len, texts)) > 40:
            ax.tick_params(axis="x", labelrotation=35)
    else:
        pad = 0.03 * (high - low)
        low, high = low - pad, high + pad
        if parameter.log:
            marks = log_ticks(low, high)
            axis.set_ticks([math.log10(mark) for mark in marks], [f"{mark:g}" for mark in marks])
    (ax.set_xlim if which == "x" else ax.set_ylim)(low, high)


def parameter(analysis: Analysis, name: str, ax: Axes | None = None) -> Axes:
    """Draw the metric against one hyperparameter, a point a trial; a log-scaled one on a log axis.

    Raises `ValueError` where that hyperparameter does not vary.
    """
    metric, mode = analysis.require_metric()
    one, values = _named(analysis, name), trial_values(analysis)
    ax = style.axes(ax, 4.6, 3.6)
    size = float(np.clip(900 / max(len(values), 1), 5, 34))
    ax.scatter(spread(one), values, s=size, color=style.OKABE_ITO[0], alpha=0.55, linewidths=0, zorder=3)
    if one.kind == "category":
        for rank in range(len(one.categories)):
            inside = values[(one.positions == rank) & np.isfinite(values)]
            if len(inside):
                ax.hlines(np.median(inside), rank - 0.3, rank + 0.3, color="#20242A", linewidth=2, zorder=4)
    if analysis.has_best:
        best = analysis.trials.index(analysis.best_trial)
        ax.plot(spread(one)[best], values[best], "*", color=style.BEST, markersize=13, zorder=6, label="best")
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
    one, two, values = _named(analysis, x), _named(analysis, y), trial_values(analysis)
    ax = style.axes(ax, 5.6, 4.4)
    known = np.isfinite(values)
    norm, shades = style.shade(values, mode)
    ax.grid(False)
    _axis_of(ax, one, "x")
    _axis_of(ax, two, "y")
    ground = _ground(ax, analysis, one, two, norm, shades)
    size = float(np.clip(1500 / max(len(values), 1), 6, 44))
    drawn = ax.scatter(
        spread(one)[known],
        spread(two, 1)[known],
        c=values[known],
        norm=norm,
        cmap=shades,
        s=size,
        zorder=3,
        edgecolors="white",
        linewidths=0.5 if size > 12 else 0.2,
    )
    bar = ax.figure.colorbar(drawn, ax=ax, pad=0.02, aspect=30)
    bar.set_label(style.words(metric), fontsize=9)
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
    ax.set_yticks(places, [style.words(name) for name in found.names])
    ax.grid(axis="y", visible=False)
    ax.set_xlim(left=0)
    ax.set_xlabel("drop of R² when shuffled")
    trust = f"the model's R² on held-out trials: {found.r2:.2f}"
    if found.r2 < 0.2:
        trust += "; too low to trust these bars"
    style.title(ax, "Importance of hyperparameters", f"{METHOD}; {trust}")
    return ax
