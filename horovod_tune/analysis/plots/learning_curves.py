"""Learning curves, and the best value so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from horovod_tune.analysis.open_experiment import Analysis
from horovod_tune.analysis.plots import style
from horovod_tune.analysis.printable import counted
from horovod_tune.analysis.trial_details import config_changes

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_POINTS = 40_000  # of all curves together: a browser draws this many points without a pause
_FEWEST, _MOST = 8, 400  # points of one curve


def learning_curves(analysis: Analysis, against: str = "iteration") -> Figure:
    """Draw every trial's metric against its "iteration" or the experiment's wall-clock "time".

    Up to eight trials have a colour each. If there are more, the better ones are darker, and the best one is
    drawn in orange over the others. A trial's curve has a gap where the trial started again, and a diamond
    where its hyperparameters changed, as when PopulationBasedTraining replaces a trial. Long curves are drawn
    with at most 400 points, which include their extremes.
    """
    if against not in ("iteration", "time"):
        raise ValueError(f'against must be "iteration" or "time", got {against!r}')
    metric, mode = analysis.require_metric()
    reports = analysis.reports[analysis.reports["has_value"]]
    if reports.empty:
        return style.figure("Learning curves", empty=f"no trial has reported {metric}")
    begun, xs = reports["attempt"], reports["iteration"]
    if against == "time":
        begun, xs = begun + reports["session"], reports["time"] - (analysis.record.start_time or 0.0)
    end = float(xs[np.isfinite(xs)].max()) if np.isfinite(xs).any() else 0.0
    x_axis, length = style.progress_axis(against, end)
    y_axis, outside = style.metric_axis(reports["value"].to_numpy(), mode, metric)
    points = pd.DataFrame({"x": xs / length, "y": reports["value"], "begun": begun})
    count = reports["trial"].nunique()
    most = int(np.clip(_POINTS // count, _FEWEST, _MOST))
    lines = {trial: _line(one.to_numpy(), most) for trial, one in points.groupby(reports["trial"])}
    note = style.joined(counted(count, "trial"), style.direction(mode), outside)
    traces, order = (_few, "normal") if count <= style.FEW else (_many, "reversed")
    made = style.figure("Learning curves", note).add_traces(traces(analysis, lines))
    made.add_traces(_new_configs(analysis, points))
    return made.update_layout(xaxis=x_axis, yaxis=y_axis, legend_traceorder=order)


def _line(reports: np.ndarray, most: int) -> np.ndarray:
    """Return one curve's points, shape (points, 2), with a row of NaN before each new start.

    `reports` has x, y and the number of the start, shape (reports, 3).
    """
    kept = reports[thinned(reports[:, 1], most)]
    return np.insert(kept[:, :2], np.flatnonzero(np.diff(kept[:, 2])) + 1, np.nan, axis=0)


def thinned(values: np.ndarray, most: int) -> np.ndarray:
    """Return the indices of at most `most` points of a curve: its ends, and equal stretches' extremes."""
    count = len(values)
    if count <= most:
        return np.arange(count)
    kept = {0, count - 1}
    for stretch in np.array_split(np.arange(1, count - 1), max(1, (most - 2) // 2)):
        inside = values[stretch]
        if np.isfinite(inside).any():
            kept.update((int(stretch[np.nanargmin(inside)]), int(stretch[np.nanargmax(inside)])))
        else:
            kept.add(int(stretch[0]))
    return np.array(sorted(kept))


def _few(analysis: Analysis, lines: dict[int, np.ndarray]) -> list[Any]:
    traces = []
    for tint, (trial, points) in zip(style.OKABE_ITO, lines.items(), strict=False):
        winner = trial == analysis.best_number
        name = style.as_text(analysis.trials[trial].trial_id) + (" (best)" if winner else "")
        look: dict[str, Any] = {"line": {"color": tint, "width": 3 if winner else 1.7}, "marker": {"size": 5}}
        look |= {"mode": "lines+markers" if len(points) < 60 else "lines", "hovertemplate": "%{x}: %{y}"}
        traces.append(look | {"x": points[:, 0], "y": points[:, 1], "name": name})
    return traces


def _many(analysis: Analysis, lines: dict[int, np.ndarray]) -> list[Any]:
    """Return traces by rank, worst trials first, best trial last; a single report is a point."""
    traces: list[Any] = []

    def add(name: str, trials: list[int], mode: str, colour: str, width: float) -> None:
        if trials:
            names = style.trial_names(analysis)[trials]
            trace = style.together([lines[trial] for trial in trials], names, "%{text}<br>%{x}: %{y}")
            look = {"mode": mode, "line": {"color": colour, "width": width}, "marker": {"size": 4}}
            traces.append(trace | look | {"name": name, "legendgroup": name, "showlegend": False})

    ranked = [trial for trial in analysis.ranked if trial in lines]
    best = [trial for trial in ranked if trial == analysis.best_number]
    for name, colour, faint, trials in style.by_rank(ranked[len(best) :], reach=80):
        traces.append(style.legend_entry(name, colour, 1.6))
        add(name, [trial for trial in trials if len(lines[trial]) > 1], "lines", faint, 1.2)
        add(name, [trial for trial in trials if len(lines[trial]) == 1], "markers", faint, 1.2)
    traces += [style.legend_entry("best", style.BEST, 3)] if best else []
    add("best", best, "lines+markers", style.BEST, 3)
    return traces


def _new_configs(analysis: Analysis, points: pd.DataFrame) -> list[Any]:
    """Return a trace that marks the reports from which on a trial has new hyperparameters, if there are any.

    `points` has a row for each report that is drawn, with the index of `analysis.reports`.
    """
    numbers = analysis.reports.loc[points.index, ["trial", "row"]]
    changes = {number: config_changes(trial) for number, trial in enumerate(analysis.trials)}
    chosen = [row in changes[trial] for trial, row in zip(numbers["trial"], numbers["row"], strict=True)]
    marked = points[chosen]
    if marked.empty:
        return []
    look = {"symbol": "diamond-open", "size": 8, "color": style.INK}
    texts = style.trial_names(analysis)[numbers.loc[marked.index, "trial"]]
    template = "%{text}, new hyperparameters<br>%{x}: %{y}<extra></extra>"
    mark = {"mode": "markers", "marker": look, "name": "new hyperparameters", "hovertemplate": template}
    return [mark | {"x": marked["x"], "y": marked["y"], "text": texts}]


def best_so_far(
    analysis: Analysis | Mapping[str, Analysis | Sequence[Analysis]] | Sequence[Analysis],
    against: str = "time",
) -> Figure:
    """Draw the best value so far against wall-clock "time" or the number of "trials".

    To compare several experiments in one plot, pass a list (they are named by their folders) or a dictionary
    from name to analysis. Several analyses under one name (a searcher's runs with different seeds) are drawn
    as their median and range. Raises `ValueError` if the experiments differ in metric or mode.
    """
    groups = _groups(analysis)
    compared = {a.require_metric() for group in groups.values() for a in group}
    if len(compared) != 1:
        raise ValueError(f"experiments to compare must have the same metric and mode, got {sorted(compared)}")
    metric, mode = compared.pop()
    drawn = {name: [best_steps(one, against) for one in group] for name, group in groups.items()}
    steps = {name: started for name, group in drawn.items() if (started := [s for s in group if len(s[0])])}
    if not steps:
        return style.figure("Best so far", empty=f"no trial has reported a finite {metric}")
    end = max(float(x[-1]) for group in steps.values() for x, _ in group)
    x_axis, length = style.progress_axis(against, end)
    values = np.concatenate([best for group in steps.values() for _, best in group])
    y_axis, _ = style.metric_axis(values, mode, metric, cut=False)
    made = style.figure("Best so far", style.direction(mode))
    for number, (name, group) in enumerate(steps.items()):
        made.add_traces(_group(name, group, style.OKABE_ITO[number % style.FEW], length))
    made.update_layout(showlegend=len(steps) > 1, xaxis=x_axis | {"rangemode": "tozero"})
    return made.update_layout(yaxis=y_axis, yaxis_title_text=f"best {style.label(metric)} so far")


def best_steps(analysis: Analysis, against: str) -> tuple[np.ndarray, np.ndarray]:
    """Return steps (x, best value up to x): x is seconds since the start, or the number of trials.

    Against "time", every report that meets the limits counts; against "trials", each trial's best value. Only
    the points at which the best changes, and the last point, are returned.
    """
    _, mode = analysis.require_metric()
    if against == "trials":
        values = analysis.scores["best"].to_numpy()
        xs = np.arange(1.0, len(values) + 1)
    elif against == "time":
        reports = analysis.reports
        reports = reports[reports["allowed"] & np.isfinite(reports["time"])]
        reports = reports.sort_values("time", kind="stable")
        values = reports["value"].to_numpy()
        xs = reports["time"].to_numpy() - (analysis.record.start_time or 0.0)
    else:
        raise ValueError(f'against must be "time" or "trials", got {against!r}')
    sign = 1.0 if mode == "min" else -1.0
    best = np.minimum.accumulate(np.where(np.isfinite(values), sign * values, np.inf))
    steps = np.flatnonzero(best < np.append(np.inf, best)[:-1])
    if len(steps) and xs[-1] > xs[steps[-1]]:
        steps = np.append(steps, len(xs) - 1)
    return xs[steps], sign * best[steps]


def _group(name: str, group: list[tuple[np.ndarray, np.ndarray]], tint: str, length: float) -> list[Any]:
    look: dict[str, Any] = {"line": {"color": tint, "width": 2.4, "shape": "hv"}, "hovertemplate": "%{y}"}
    name = style.as_text(name)
    if len(group) == 1:
        x, y = group[0]
        dots = {"size": [6.0] * (len(x) - 1) + [0.0 if len(x) > 1 else 6.0]}
        return [look | {"x": x / length, "y": y, "name": name, "mode": "lines+markers", "marker": dots}]
    every = np.unique(np.concatenate([x for x, _ in group]))
    every = every[every >= max(x[0] for x, _ in group)]  # from there on every experiment has a value
    held = np.stack([y[np.searchsorted(x, every, side="right") - 1] for x, y in group])
    line = {"x": every / length, "mode": "lines"}
    edge = line | {"line": {"width": 0, "shape": "hv"}, "hoverinfo": "skip", "showlegend": False}
    fill = {"fill": "tonexty", "fillcolor": style.faded(tint, 0.18)}
    median = line | look | {"y": np.median(held, axis=0), "name": f"{name} (median)"}
    return [edge | {"y": held.min(axis=0)}, edge | fill | {"y": held.max(axis=0)}, median]


def _groups(
    given: Analysis | Mapping[str, Analysis | Sequence[Analysis]] | Sequence[Analysis],
) -> dict[str, list[Analysis]]:
    if isinstance(given, Mapping):
        return {name: [one] if isinstance(one, Analysis) else list(one) for name, one in given.items()}
    groups: dict[str, list[Analysis]] = {}
    for number, one in enumerate([given] if isinstance(given, Analysis) else given, start=1):
        groups[one.name if one.name not in groups else f"{one.name} ({number})"] = [one]
    return groups
