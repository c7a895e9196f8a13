"""A plot of every trial as a line through all hyperparameters to its metric."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from horovod_tune.analysis.plots import style
from horovod_tune.analysis.results import Analysis
from horovod_tune.analysis.varying_parameters import Parameter, text_of, varying_parameters

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def parallel_coordinates(analysis: Analysis) -> Figure:
    """Draw each trial as a line through the hyperparameters that vary, ending at its metric.

    The trials are in four groups by their rank. A click on a group in the legend hides it, a double click
    hides the others. The lines are ordinary traces, because Plotly's own parallel coordinates need WebGL
    and `eval`, which the report's content security policy forbids.
    """
    metric, mode = analysis.require_metric()
    found = varying_parameters(analysis)
    values = analysis.values
    known = np.flatnonzero(np.isfinite(values))
    if not len(known) or not found:
        empty = f"no trial has a finite {metric}" if not len(known) else "no hyperparameter varies"
        return style.figure("Parallel coordinates", empty=empty)
    y_axis, outside = style.metric_axis(values[known], mode, metric)
    low, high = y_axis["range"]
    of_metric = np.clip((values - low) / (high - low), 0, 1)
    heights = np.column_stack([*map(_heights, found), of_metric])
    texts = style.hover_texts(analysis)
    made = style.figure(
        "Parallel coordinates", style.joined(f"{len(known):,} trials", "orange: the best", outside)
    )
    groups = style.by_rank([trial for trial in analysis.ranked if np.isfinite(values[trial])], reach=100)
    groups += [("best", style.BEST, [analysis.best_number])] if analysis.has_best else []
    for name, colour, trials in groups:
        lines = [np.column_stack([np.arange(len(found) + 1), heights[trial]]) for trial in trials]
        look = {"color": colour, "width": 3 if name == "best" else 1.3}
        made.add_scatter(
            **style.together(lines, texts[trials], "%{text}"), name=name, mode="lines", line=look
        )
    ticks = [*(_ticks(one) for one in found), _ends(low, high)]
    for place, marks in enumerate(ticks):
        made.add_shape(type="line", x0=place, x1=place, y0=0, y1=1, line={"color": "#5B616A", "width": 1})
        for height, text in marks:
            look = {"bgcolor": "rgba(255,255,255,0.75)", "font_size": 11, "borderpad": 1, "xanchor": "left"}
            made.add_annotation(x=place, y=height, text=style.label(text, 14), showarrow=False, **look)
    names = [style.label(name, 18) for name in (*(one.name for one in found), metric)]
    x_axis = {"tickvals": list(range(len(names))), "ticktext": names, "showgrid": False, "ticks": ""}
    return made.update_layout(
        xaxis=x_axis | {"range": [-0.15, len(found) + 0.45]},
        yaxis={"visible": False, "range": [-0.04, 1.04]},
        legend_traceorder="reversed",
    )


def _heights(one: Parameter) -> np.ndarray:
    low, high = one.limits()
    positions = style.on_axis(one) if one.kind == "category" else one.positions
    return (positions - low) / (high - low)


def _ticks(one: Parameter) -> list[tuple[float, str]]:
    low, high = one.limits()
    if one.kind == "category":
        every = max(1, math.ceil(len(one.categories) / 12))
        shown = list(enumerate(one.categories))[::every]
        return [((rank - low) / (high - low), text) for rank, text in shown]
    if one.log and math.floor(high) > math.ceil(low):
        decades = range(math.ceil(low), math.floor(high) + 1, max(1, round((high - low) / 6)))
        return [((decade - low) / (high - low), f"{10.0**decade:g}") for decade in decades]
    return _ends(low, high, one)


def _ends(low: float, high: float, one: Parameter | None = None) -> list[tuple[float, str]]:
    """Return three marks: an axis's ends and its middle."""
    marks = [10.0**mark if one and one.log else mark for mark in (low, (low + high) / 2, high)]
    texts = [text_of(round(mark) if one and one.integer else float(f"{mark:.3g}")) for mark in marks]
    return list(zip((0.0, 0.5, 1.0), texts, strict=True))
