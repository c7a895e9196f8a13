"""Plots of which trial held which ranks when, and of the Pareto front of two metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from horovod_tune.analysis.open_experiment import Analysis
from horovod_tune.analysis.plots import style
from horovod_tune.analysis.trial_details import hosts_of, ranks_of

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_ROW_PX, _HIGHEST_PX = 22, 700
_START = "#E0CE1A"


def timeline(analysis: Analysis) -> Figure:
    """Draw which trial held which ranks when, with its start-up time in yellow.

    A row has room for one rank (on a certain host, if the reports name the hosts), or for one whole trial if
    the reports lack the number of ranks. Trials on a row alternate between two blues; failed ones are black,
    the best one is orange. Gaps between the drivers of a resumed search are grey.
    """
    bars, rows, unit = timeline_bars(analysis)
    title = "Which trial held which ranks when" if unit != "trials at once" else "Which trial ran when"
    if bars.empty:
        return style.figure(title, empty="no trial has begun")
    x_axis, length = style.progress_axis("time", bars["end"].max())
    turn = bars.groupby("row").cumcount() % 2
    failed = bars["trial"].map(lambda trial: analysis.trials[trial].status == "ERROR")
    best = bars["trial"] == analysis.best_number
    height = int(np.clip(150 + _ROW_PX * len(rows), 240, _HIGHEST_PX))
    starts, few = bars["trained"] > bars["begin"], len(bars) < 100
    made = style.figure(title, "" if starts.any() else "start-up time is not recorded", height=height)
    for name, colour, chosen, (since, until) in (
        ("training", style.OKABE_ITO[0], ~failed & ~best & (turn == 0), ("trained", "end")),
        ("training, next trial", style.OKABE_ITO[4], ~failed & ~best & (turn == 1), ("trained", "end")),
        ("failed", style.INK, failed, ("trained", "end")),
        ("best trial", style.BEST, best & ~failed, ("trained", "end")),
        ("starting up", _START, starts, ("begin", "trained")),
    ):
        shown = bars[chosen]
        if shown.empty:
            continue
        made.add_bar(
            base=(shown[since] / length).to_numpy(),
            x=((shown[until] - shown[since]) / length).to_numpy(),
            y=shown["row"].to_numpy(),
            text=style.trial_names(analysis)[shown["trial"]],
            textposition="none",
            orientation="h",
            name=name,
            # Plotly draws an opaque bar at least a pixel wide, and start-ups over all else if there are many.
            marker={"color": style.faded(colour, 0.999), "line": {"color": "white", "width": 0.5 * few}},
            hovertemplate=f"%{{text}}, {name}<br>%{{base:.4g}} + %{{x:.3g}}<extra></extra>",
        )
    zero = analysis.record.start_time or 0.0
    for begin, end in analysis.session_gaps:
        grey = {"fillcolor": style.faded(style.QUIET, 0.2), "line_width": 0, "layer": "below"}
        note = {"annotation_text": "no driver", "annotation_position": "top left", "annotation_font_size": 11}
        made.add_vrect(x0=(begin - zero) / length, x1=(end - zero) / length, **grey, **note)
    every = max(1, len(rows) // 32)
    names = [style.label(name or "·", 24) for name in rows]
    y_axis: dict[str, Any] = {"title": {"text": unit}, "autorange": "reversed", "showgrid": False}
    y_axis |= {"tickvals": list(range(0, len(names), every)), "ticktext": names[::every]}
    return made.update_layout(xaxis=x_axis, yaxis=y_axis, barmode="overlay", showlegend=True)


def timeline_bars(analysis: Analysis) -> tuple[pd.DataFrame, list[str], str]:
    """Return a timeline's bars, the names of its rows, and what a row is.

    A bar is a period in which a trial held a row, earliest first: trial, row, and, in seconds since the
    experiment's start, begin (of the start-up), trained (when training began) and end.
    """
    now = analysis.record.last_write or 0.0
    spans, times = analysis.spans.copy(), ["begin", "trained", "end"]
    running = spans["trial"].map(lambda trial: analysis.trials[trial].status == "RUNNING").astype(bool)
    newest = ~spans["trial"].duplicated(keep="last") & (
        spans["end"] >= max(analysis.record.sessions, default=0.0)
    )
    spans["end"] = spans["end"].mask(running & newest, spans["end"].clip(lower=now))
    spans[times] -= analysis.record.start_time or 0.0
    # Ranks take the free rows of their host; a row is free as soon as the period on it has ended.
    ends: dict[str, list[float]] = {}
    bars = []
    for span in spans.sort_values([*times, "trial"]).to_dict("records"):
        trial = analysis.trials[span["trial"]]
        for host in hosts_of(trial) or [""] * (ranks_of(trial) or 1):
            slots = ends.setdefault(host, [])
            slot = next((s for s, end in enumerate(slots) if end <= span["begin"] + 1e-3), len(slots))
            slots[slot : slot + 1] = [span["end"]]
            bars.append(span | {"row": (host, slot)})
    places = [(host, slot) for host in sorted(ends) for slot in range(len(ends[host]))]
    table = pd.DataFrame(bars, columns=["trial", "row", *times])
    table["row"] = table["row"].map({place: row for row, place in enumerate(places)})
    names = [f"{host} {slot}" if host else str(slot + 1) for host, slot in places]
    has_ranks = any(ranks_of(trial) for trial in analysis.trials)
    unit = "hosts' slots" if any(ends) and "" not in ends else "ranks" if has_ranks else "trials at once"
    return table, names, unit


def pareto_front(analysis: Analysis, metrics: Mapping[str, str]) -> Figure:
    """Draw all results by two metrics, and their Pareto front: those that no other result dominates.

    `metrics` maps two metrics to "min" or "max"; the first is the horizontal axis. The stepped line is the
    border of what the front dominates. Raises `ValueError` as `Analysis.pareto_front` does.
    """
    front = analysis.pareto_front(metrics)
    if len(front.metrics) != 2:
        names = ", ".join(front.metrics)
        raise ValueError(f"metrics must name exactly two metrics, got {len(front.metrics)}: {names}")
    (x, x_mode), (y, y_mode) = front.metrics.items()
    title = f"{style.label(x)} against {style.label(y)}"
    finite = np.isfinite(front.points).all(axis=1)
    if not finite.any():
        return style.figure(title, empty=f"no trial has reported a finite {x} and {y}")
    rest = np.flatnonzero(finite & ~front.on_front)
    made = style.figure(title, f"{len(front.members)} of {int(finite.sum()):,} results are not dominated")
    # The front starts at the best x; up to the next member's x, a member's y is the best.
    dots = {"mode": "markers", "marker": {"color": style.QUIET, "size": 5, "opacity": 0.6}}
    steps = {"mode": "lines+markers", "line": {"color": style.BEST, "shape": "hv"}, "marker_size": 8}
    for name, chosen, look in (("other results", rest, dots), ("front", front.members, steps)):
        texts = style.trial_names(analysis)[[front.places[point][0] for point in chosen]]
        template = "%{text}<br>%{x}, %{y}<extra></extra>"
        x_values, y_values = front.points[chosen].T
        made.add_scatter(x=x_values, y=y_values, text=texts, name=name, hovertemplate=template, **look)
    for axis, number in (("xaxis", 0), ("yaxis", 1)):
        made.update_layout({axis: style.value_format(front.points[finite][:, number])})
    return made.update_layout(
        xaxis_title_text=f"{style.label(x)} ({style.direction(x_mode)})",
        yaxis_title_text=f"{style.label(y)} ({style.direction(y_mode)})",
        showlegend=True,
    )
