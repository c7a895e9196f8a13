"""Plots of the metric against hyperparameters, of whole configurations, and of importances."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_tune.analysis.open_experiment import Analysis
from horovod_tune.analysis.plots import style
from horovod_tune.analysis.printable import counted, digits_for
from horovod_tune.analysis.varying_parameters import Parameter

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_METHOD = "permutation importance on a random forest (scikit-learn), out of fold"
_BARS, _MIN_TRIALS = 20, 10
_MAX_TRIALS = 1000  # if there are more, a sample is used: the order of the importances is the same
_TREES, _FOLDS, _REPEATS, _SEED = 50, 5, 3, 0


def parameter(analysis: Analysis, name: str) -> Figure:
    """Draw the metric against one hyperparameter, on a log axis if its domain is logarithmic.

    Raises `ValueError` if that hyperparameter does not vary.
    """
    by_name = {one.name: one for one in analysis.varying_parameters}
    if name not in by_name:
        names = ", ".join(by_name) or "none"
        raise ValueError(f"no hyperparameter {name!r} varies among the trials; those that do: {names}")
    return _grid(analysis, [by_name[name]], style.figure(style.label(name), height=340))


def parameters(analysis: Analysis) -> Figure:
    """Draw the metric against each hyperparameter in one figure. Raises `ValueError` if none varies."""
    varying = analysis.varying_parameters
    if not varying:
        raise ValueError("no hyperparameter varies among the trials")
    return _grid(
        analysis, varying, style.figure("Hyperparameters", height=130 + 290 * math.ceil(len(varying) / 3))
    )


def _grid(analysis: Analysis, drawn: Sequence[Parameter], made: Figure) -> Figure:
    """Draw hyperparameters into a figure, three in a row."""
    from plotly.subplots import make_subplots

    grid = make_subplots(math.ceil(len(drawn) / 3), min(3, len(drawn)), figure=made, shared_yaxes=True)
    for place, one in enumerate(drawn):
        row, column = place // 3 + 1, place % 3 + 1
        traces, x_axis, y_axis, outside = _points(analysis, one)
        grid.add_traces(traces, rows=row, cols=column)
        y_axis |= {} if column == 1 else {"title": {"text": ""}}
        grid.update_xaxes(x_axis, row=row, col=column).update_yaxes(y_axis, row=row, col=column)
    medians = "bars: medians" if any(one.kind == "category" for one in drawn) else ""
    return grid.update_layout(title_subtitle_text=style.joined(medians, outside))


def _points(analysis: Analysis, one: Parameter) -> tuple[list[Any], dict[str, Any], dict[str, Any], str]:
    """Return the metric's traces against a hyperparameter, both axes, and a note on values not shown."""
    metric, mode = analysis.require_metric()
    values, xs = analysis.values, style.on_axis(one)
    finite = np.isfinite(values) & np.isfinite(xs)
    y_axis, outside = style.metric_axis(values[np.isfinite(values)], mode, metric)
    texts = style.hover_texts(analysis)
    size = float(np.clip(900 / max(len(values), 1), 4, 8))
    look: dict[str, Any] = {"mode": "markers", "showlegend": False}
    look["hovertemplate"] = "%{text}<br>%{y}<extra></extra>"
    dots = {"color": style.OKABE_ITO[0], "size": size, "opacity": 0.55}
    drawn = [look | {"x": xs[finite], "y": values[finite], "text": texts[finite], "marker": dots}]
    for rank in range(len(one.categories)):
        inside = values[(one.positions == rank) & np.isfinite(values)]
        if len(inside):
            bar = {"x": [rank - 0.3, rank + 0.3], "y": [np.median(inside)] * 2, "mode": "lines"}
            drawn.append(bar | {"line": {"color": style.INK, "width": 2.5}, "showlegend": False, "name": ""})
    best = analysis.best_number
    if best is not None:
        star = {"symbol": "star", "color": style.BEST, "size": 14}
        drawn.append(look | {"x": [xs[best]], "y": [values[best]], "text": [texts[best]], "marker": star})
    return drawn, style.parameter_axis(one), y_axis, outside


def parallel_coordinates(analysis: Analysis) -> Figure:
    """Draw each trial as a line through the hyperparameters that vary, ending at its metric.

    The trials are in four groups by their rank. A click on a group in the legend hides it, a double click
    hides the others. The lines are ordinary traces, because Plotly's own parallel coordinates need WebGL
    and `eval`, which the report's content security policy forbids.
    """
    metric, mode = analysis.require_metric()
    varying = analysis.varying_parameters
    values = analysis.values
    finite = np.flatnonzero(np.isfinite(values))
    if not len(finite) or not varying:
        empty = f"no trial has a finite {metric}" if not len(finite) else "no hyperparameter varies"
        return style.figure("Parallel coordinates", empty=empty)
    y_axis, outside = style.metric_axis(values[finite], mode, metric)
    # The metric is one more axis.
    log, ends = y_axis.get("type") == "log", np.array(y_axis["range"])
    shown = np.clip(values, *(10.0**ends if log else ends))
    axes = [*varying, Parameter(metric, "numeric", tuple(shown), log=log)]
    heights = np.column_stack([_heights(axis) for axis in axes])
    texts = style.hover_texts(analysis)
    made = style.figure(
        "Parallel coordinates", style.joined(counted(len(finite), "trial"), "orange: the best", outside)
    )
    groups = style.by_rank([trial for trial in analysis.ranked if np.isfinite(values[trial])], reach=100)
    if analysis.best_number is not None:
        groups.append(("best", style.BEST, style.BEST, [analysis.best_number]))
    for name, colour, faint, trials in groups:
        lines = [np.column_stack([np.arange(len(axes)), heights[trial]]) for trial in trials]
        width = 3.0 if name == "best" else 1.3
        look: dict[str, Any] = {"name": name, "mode": "lines", "line": {"color": faint, "width": width}}
        look |= {"legendgroup": name, "showlegend": False}
        made.add_scatter(**style.legend_entry(name, colour, width))
        made.add_scatter(**style.together(lines, texts[trials], "%{text}"), **look)
    for place, axis in enumerate(axes):
        made.add_shape(type="line", x0=place, x1=place, y0=0, y1=1, line={"color": "#5B616A", "width": 1})
        for height, text in _ticks(axis):
            look = {"bgcolor": "rgba(255,255,255,0.75)", "font_size": 11, "borderpad": 1, "xanchor": "left"}
            made.add_annotation(
                x=place,
                y=height,
                text=style.label(text, 14 if axis.kind == "category" else 24),
                showarrow=False,
                **look,
            )
    names = [style.end_of(axis.name, 18) for axis in axes]
    x_axis = {"tickvals": list(range(len(names))), "ticktext": names, "showgrid": False, "ticks": ""}
    return made.update_layout(
        xaxis=x_axis | {"range": [-0.5, len(varying) + 0.5]},
        yaxis={"visible": False, "range": [-0.04, 1.04]},
        legend_traceorder="reversed",
    )


def _heights(one: Parameter) -> np.ndarray:
    low, high = one.limits()
    positions = style.on_axis(one) if one.kind == "category" else one.positions
    return (positions - low) / (high - low)


def _ticks(one: Parameter) -> list[tuple[float, str]]:
    """Return heights and texts of an axis's marks: choices, decades, or both ends and the middle."""
    low, high = one.limits()
    if one.kind == "category":
        every = max(1, math.ceil(len(one.categories) / 12))
        marks: list[tuple[float, str]] = [
            (rank * every, text) for rank, text in enumerate(one.categories[::every])
        ]
    elif one.log and math.floor(high) > math.ceil(low):
        decades = range(math.ceil(low), math.floor(high) + 1, max(1, round((high - low) / 6)))
        marks = [(decade, f"{10.0**decade:g}") for decade in decades]
    else:
        values = {mark: 10.0**mark if one.log else mark for mark in (low, (low + high) / 2, high)}
        digits = digits_for(list(values.values()), 3)
        marks = [(m, str(round(v)) if one.integer else f"{v:.{digits}g}") for m, v in values.items()]
    return [((mark - low) / (high - low), text) for mark, text in marks]


def importance(analysis: Analysis) -> Figure:
    """Draw how much each hyperparameter matters: permutation importance on a random forest (scikit-learn).

    With five-fold cross-validation, a forest predicts each trial's rank by the metric from its
    hyperparameters; ranks keep one diverged trial from dominating. A bar is the drop of R² on held-out trials
    when a hyperparameter's values are shuffled (Breiman, Random Forests, 2001): its mean and standard
    deviation over folds and repeats. The 20 largest are drawn. If fewer than 10 trials have a value, or
    nothing varies, the figure has a text instead.
    """
    parameters = analysis.varying_parameters
    rows = int(np.isfinite(analysis.values).sum())
    if rows < _MIN_TRIALS or not parameters:
        few = (
            f"importances need at least {_MIN_TRIALS} trials with a value (there are {rows}) "
            f"and a hyperparameter that varies (there are {len(parameters)})"
        )
        return style.figure("Importance", height=200, empty=few)
    drops, r2, trials = permuted(analysis)
    order = np.argsort(-drops.mean(axis=1), kind="stable")[:_BARS]
    names = [style.end_of(parameters[place].name, 24) for place in order]
    trust = ", too low to trust these bars" if r2 < 0.2 else ""
    note = f"{_METHOD} · {counted(trials, 'trial')} · R² of the model on held-out trials: {r2:.2f}{trust}"
    made = style.figure("Importance", note, height=150 + 30 * len(names))
    made.add_bar(
        x=np.maximum(drops.mean(axis=1)[order], 0.0),
        y=list(range(len(names))),
        error_x={"array": drops.std(axis=1)[order], "thickness": 1.2, "width": 4, "color": style.INK},
        hovertemplate="%{x:.3f}<extra></extra>",
        orientation="h",
        marker_color=style.OKABE_ITO[0],
    )
    return made.update_layout(
        xaxis={"title": {"text": "drop of R² when shuffled"}, "rangemode": "tozero"},
        yaxis={"tickvals": list(range(len(names))), "ticktext": names, "autorange": "reversed"},
    )


def permuted(analysis: Analysis) -> tuple[np.ndarray, float, int]:
    """Return the drops of R², shape (hyperparameters, folds * repeats), R², and the number of trials used."""
    from sklearn.ensemble import RandomForestRegressor
    from sklearn.inspection import permutation_importance
    from sklearn.metrics import r2_score
    from sklearn.model_selection import KFold

    features = np.column_stack([one.positions for one in analysis.varying_parameters])
    # A trial that lacks a parameter gets a value below all others.
    lowest = np.min(features, axis=0, where=np.isfinite(features), initial=np.inf) - 1.0
    features = np.where(np.isfinite(features), features, lowest)
    used = np.flatnonzero(np.isfinite(analysis.values))
    if len(used) > _MAX_TRIALS:
        used = np.sort(np.random.default_rng(_SEED).choice(used, _MAX_TRIALS, replace=False))
    features, ranks = features[used], analysis.values[used].argsort(kind="stable").argsort().astype(float)
    drops, predicted = [], np.empty_like(ranks)
    for train, held in KFold(_FOLDS, shuffle=True, random_state=_SEED).split(features):
        forest = RandomForestRegressor(_TREES, min_samples_leaf=2, random_state=_SEED, n_jobs=1)
        forest.fit(features[train], ranks[train])
        predicted[held] = forest.predict(features[held])
        how = {"n_repeats": _REPEATS, "random_state": _SEED, "scoring": "r2"}
        drops.append(permutation_importance(forest, features[held], ranks[held], **how).importances)
    return np.concatenate(drops, axis=1), float(r2_score(ranks, predicted)), len(used)
