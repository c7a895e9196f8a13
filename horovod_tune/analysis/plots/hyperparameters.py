"""The metric over the space: single hyperparameters, and their importances."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_tune.analysis.importance import METHOD, TooFewTrials, importances
from horovod_tune.analysis.plots import style
from horovod_tune.analysis.results import Analysis
from horovod_tune.analysis.varying_parameters import Parameter, varying_parameters

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_BARS = 20


def parameter(analysis: Analysis, name: str) -> Figure:
    """Draw the metric against one hyperparameter, a point per trial; a log-scaled one on a log axis.

    Raises `ValueError` if that hyperparameter does not vary.
    """
    one = _named(analysis, name)
    made = style.figure(style.label(name), height=340)
    traces, x_axis, y_axis, outside = _points(analysis, one)
    note = style.joined("bars: medians" if one.kind == "category" else "", outside)
    return made.add_traces(traces).update_layout(xaxis=x_axis, yaxis=y_axis, title_subtitle_text=note)


def parameters(analysis: Analysis) -> Figure:
    """Draw the metric against each hyperparameter, side by side in one figure."""
    from plotly.subplots import make_subplots

    found = varying_parameters(analysis)
    if not found:
        raise ValueError("no hyperparameter varies among the trials")
    across = min(3, len(found))
    down = math.ceil(len(found) / across)
    grid = make_subplots(down, across, figure=style.figure("Hyperparameters", height=130 + 290 * down))
    for place, one in enumerate(found):
        cell = {"row": place // across + 1, "col": place % across + 1}
        traces, x_axis, y_axis, _ = _points(analysis, one)
        grid.add_traces(traces, rows=cell["row"], cols=cell["col"])
        grid.update_xaxes(x_axis, **cell)
        grid.update_yaxes(y_axis, **cell)
    return grid


def _named(analysis: Analysis, name: str) -> Parameter:
    found = varying_parameters(analysis)
    for one in found:
        if one.name == name:
            return one
    known = ", ".join(one.name for one in found) or "none"
    raise ValueError(f"no hyperparameter {name!r} varies among the trials; those that do: {known}")


def _points(analysis: Analysis, one: Parameter) -> tuple[list[Any], dict[str, Any], dict[str, Any], str]:
    """Return the traces of the metric against a hyperparameter, both axes, and a note on values outside."""
    metric, mode = analysis.require_metric()
    values, xs = analysis.values, style.on_axis(one)
    known = np.isfinite(values) & np.isfinite(xs)
    y_axis, outside = style.metric_axis(values[np.isfinite(values)], mode, metric)
    texts = style.hover_texts(analysis)
    size = float(np.clip(900 / max(len(values), 1), 4, 8))
    look: dict[str, Any] = {"mode": "markers", "showlegend": False}
    look["hovertemplate"] = "%{text}<br>%{y:.5g}<extra></extra>"
    dots = {"color": style.OKABE_ITO[0], "size": size, "opacity": 0.55}
    drawn = [look | {"x": xs[known], "y": values[known], "text": texts[known], "marker": dots}]
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


def importance(analysis: Analysis) -> Figure:
    """Draw how much each hyperparameter matters: permutation importance on a random forest (scikit-learn).

    Bars are the drop of R² on held-out trials when a hyperparameter's values are shuffled, with the standard
    deviation; the 20 largest are drawn. With too few trials the figure has a text instead. See
    `horovod_tune.analysis.importance`.
    """
    try:
        found = importances(analysis)
    except TooFewTrials as error:
        return style.figure("Importance", height=200, empty=str(error))
    names = [style.label(name, 24) for name in found.names[:_BARS]]
    drop = np.maximum(found.drop, 0.0)[:_BARS]
    trust = f"R² of the model on held-out trials: {found.r2:.2f}"
    if found.r2 < 0.2:
        trust += ", too low to trust these bars"
    note = style.joined(METHOD, f"{found.trials:,} trials", trust)
    made = style.figure("Importance", note, height=150 + 30 * len(names))
    spread = {"type": "data", "array": found.spread[:_BARS], "thickness": 1.2, "width": 4, "color": style.INK}
    look = {"orientation": "h", "marker_color": style.OKABE_ITO[0]}
    places = list(range(len(names)))
    made.add_bar(x=drop, y=places, error_x=spread, hovertemplate="%{x:.3f}<extra></extra>", **look)
    return made.update_layout(
        xaxis={"title": {"text": "drop of R² when shuffled"}, "rangemode": "tozero"},
        yaxis={"tickvals": places, "ticktext": names, "autorange": "reversed"},
    )
