"""Learning curves, and the best value so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_tune.analysis import series
from horovod_tune.analysis.plots import style
from horovod_tune.analysis.results import Analysis

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_POINTS = 40_000  # of all curves together: what a browser draws without a pause
_FEWEST, _MOST = 8, 400  # points of one curve


def learning_curves(analysis: Analysis, against: str = "iteration") -> Figure:
    """Draw every trial's metric against its "iteration" or the experiment's wall-clock "time".

    Up to eight trials have a colour each; of more, the best values are darkest. The best trial is drawn in
    orange over the others. A trial that started again is drawn from its new start. Long curves are drawn
    with at most 400 points, their extremes among them.
    """
    if against not in ("iteration", "time"):
        raise ValueError(f'against must be "iteration" or "time", got {against!r}')
    metric, mode = analysis.require_metric()
    drawn = [curve for curve in series.curves(analysis) if len(curve.values)]
    if not drawn:
        return style.figure("Learning curves", empty=f"no trial has reported {metric}")
    every = np.concatenate([curve.values for curve in drawn])
    most = int(np.clip(_POINTS // len(drawn), _FEWEST, _MOST))
    xs = [curve.iterations if against == "iteration" else curve.elapsed_s for curve in drawn]
    ends = [float(np.nanmax(x)) for x in xs if np.isfinite(x).any()]
    if against == "time":
        x_axis, length = style.time_axis(max(ends, default=0.0))
    else:
        x_axis, length = style.count_axis("iteration", max(ends, default=0.0)), 1.0
    y_axis, outside = style.metric_axis(every, mode, metric)
    lines = [_line(curve, x / length, most, against) for curve, x in zip(drawn, xs, strict=True)]
    few = len(drawn) <= style.FEW
    made = style.figure("Learning curves").add_traces((_few if few else _many)(analysis, drawn, lines))
    colours = "" if few else "the strongest colour is best; orange: the best trial"
    note = style.joined(f"{len(drawn):,} trials", style.direction(mode), colours, outside)
    return made.update_layout(xaxis=x_axis, yaxis=y_axis, title_subtitle_text=note)


def _line(curve: series.Curve, x: np.ndarray, most: int, against: str) -> np.ndarray:
    """Return one curve's points, shape (points, 2), with a row of NaN before each new start."""
    begun = curve.attempts + (curve.sessions if against == "time" else 0)
    kept = series.thinned(curve.values, most)
    points = np.column_stack([x, curve.values])[kept]
    starts = np.flatnonzero(np.diff(begun[kept])) + 1
    return np.insert(points, starts, np.nan, axis=0)


def _few(analysis: Analysis, drawn: list[series.Curve], lines: list[np.ndarray]) -> list[Any]:
    best = analysis.best_number
    traces = []
    for tint, curve, points in zip(style.OKABE_ITO, drawn, lines, strict=False):
        winner = curve.trial == best
        name = style.as_text(analysis.trials[curve.trial].trial_id) + (" (best)" if winner else "")
        look: dict[str, Any] = {"line": {"color": tint, "width": 3 if winner else 1.7}, "marker": {"size": 5}}
        look |= {"mode": "lines+markers" if len(points) < 60 else "lines", "hovertemplate": "%{x}: %{y:.5g}"}
        traces.append(look | {"x": points[:, 0], "y": points[:, 1], "name": name})
    return traces


def _many(analysis: Analysis, drawn: list[series.Curve], lines: list[np.ndarray]) -> list[Any]:
    """Return a trace per shade, worst first, then the best trial's: thousands of traces would be slow."""
    place_of = {curve.trial: place for place, curve in enumerate(drawn)}
    order = [place_of[trial] for trial in analysis.ranked if trial in place_of]
    best = analysis.best_number
    alpha = float(np.clip(80 / len(drawn), 0.15, 0.85))
    tints = [style.faded(colour, alpha) for colour in style.SEQUENTIAL]
    shades: list[tuple[list[int], dict[str, Any]]] = []
    for tint, places in reversed(list(zip(tints, np.array_split(order, len(tints)), strict=True))):
        chosen = [place for place in places if drawn[place].trial != best]
        curves = [place for place in chosen if len(lines[place]) > 1]
        single = [place for place in chosen if len(lines[place]) == 1]
        shades.append((curves, {"mode": "lines", "line": {"color": tint, "width": 1.2}}))
        shades.append((single, {"mode": "markers", "marker": {"color": tint, "size": 4}}))
    winner = [place for place, curve in enumerate(drawn) if curve.trial == best]
    orange = {"line": {"color": style.BEST, "width": 3}, "marker": {"size": 4}}
    shades.append((winner, {"mode": "lines+markers"} | orange))
    return [_together(analysis, drawn, lines, places) | look for places, look in shades if places]


def _together(
    analysis: Analysis, drawn: list[series.Curve], lines: list[np.ndarray], places: Sequence[int]
) -> dict[str, Any]:
    """Return the points of several curves with gaps between them."""
    gap = np.full((1, 2), np.nan)
    parts = [part for place in places for part in (lines[place], gap)]
    points = np.concatenate(parts).astype(np.float32)
    lengths = [len(lines[place]) + 1 for place in places]
    names = np.repeat(style.trial_names(analysis)[[drawn[place].trial for place in places]], lengths)
    told = "%{text}<br>%{x}: %{y:.5g}<extra></extra>"
    return {"x": points[:, 0], "y": points[:, 1], "text": names, "hovertemplate": told, "showlegend": False}


def best_so_far(
    analysis: Analysis | Mapping[str, Analysis | Sequence[Analysis]] | Sequence[Analysis],
    against: str = "time",
) -> Figure:
    """Draw the best value so far against wall-clock "time" or the number of "trials".

    Several experiments are compared on one picture: a list (named by their folders) or a dictionary from
    name to analysis. A name with several analyses (a searcher's seeds) is drawn as their median and range.
    Raises `ValueError` if experiments differ in metric or mode.
    """
    groups = _groups(analysis)
    compared = {a.require_metric() for group in groups.values() for a in group}
    if len(compared) != 1:
        raise ValueError(f"experiments to compare must have one metric and mode, got {sorted(compared)}")
    metric, mode = compared.pop()
    drawn = {name: [series.best_so_far(one, against) for one in group] for name, group in groups.items()}
    steps = {name: known for name, group in drawn.items() if (known := [s for s in group if len(s[0])])}
    if not steps:
        return style.figure("Best so far", empty=f"no trial has reported a finite {metric}")
    end = max(float(x[-1]) for group in steps.values() for x, _ in group)
    if against == "time":
        x_axis, length = style.time_axis(end)
    else:
        x_axis, length = style.count_axis("trials", end), 1.0
    made = style.figure("Best so far", style.direction(mode))
    for number, (name, group) in enumerate(steps.items()):
        made.add_traces(_group(name, group, style.OKABE_ITO[number % style.FEW], length))
    made.update_layout(showlegend=len(steps) > 1, xaxis=x_axis | {"rangemode": "tozero"})
    return made.update_layout(yaxis_title_text=f"best {style.label(metric)} so far")


def _group(name: str, group: list[tuple[np.ndarray, np.ndarray]], tint: str, length: float) -> list[Any]:
    look: dict[str, Any] = {"line": {"color": tint, "width": 2.4, "shape": "hv"}, "hovertemplate": "%{y:.6g}"}
    name = style.as_text(name)
    if len(group) == 1:
        x, y = group[0]
        dots = {"size": [6.0] * (len(x) - 1) + [0.0 if len(x) > 1 else 6.0]}
        return [look | {"x": x / length, "y": y, "name": name, "mode": "lines+markers", "marker": dots}]
    every = np.unique(np.concatenate([x for x, _ in group]))
    every = every[every >= max(x[0] for x, _ in group)]  # from there on each run has a value
    held = np.stack([y[np.searchsorted(x, every, side="right") - 1] for x, y in group])
    line = {"x": every / length, "mode": "lines"}
    edge = line | {"line": {"width": 0, "shape": "hv"}, "hoverinfo": "skip", "showlegend": False}
    fill = {"fill": "tonexty", "fillcolor": style.faded(tint, 0.18)}
    median = line | look | {"y": np.median(held, axis=0), "name": f"{name} (median)"}
    return [edge | {"y": held.min(axis=0)}, edge | fill | {"y": held.max(axis=0)}, median]


def _groups(
    given: Analysis | Mapping[str, Analysis | Sequence[Analysis]] | Sequence[Analysis],
) -> dict[str, list[Analysis]]:
    if isinstance(given, Analysis):
        return {given.name: [given]}
    if isinstance(given, Mapping):
        return {name: [one] if isinstance(one, Analysis) else list(one) for name, one in given.items()}
    groups: dict[str, list[Analysis]] = {}
    for number, one in enumerate(given, start=1):
        name = one.name if one.name not in groups else f"{one.name} ({number})"
        groups[name] = [one]
    return groups
