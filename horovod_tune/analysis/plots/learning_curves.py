"""Learning curves, and the best value so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_tune.analysis import series
from horovod_tune.analysis.expectations import expectations
from horovod_tune.analysis.plots import style
from horovod_tune.analysis.results import Analysis

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def learning_curves(analysis: Analysis, against: str = "iteration", ax: Axes | None = None) -> Axes:
    """Draw every trial's metric against its "iteration" or the experiment's wall-clock "time".

    Each trial has its own colour; beyond eight trials the colour tells the order in which they were made. The
    best trial is drawn over the others. A trial that started again is drawn from its new start. Against
    iterations a dashed line shows how `BayesOptSearch` expects a trial to go on that runs or waits, and where
    there are few trials a band in which about 80 of 100 reports lie.
    """
    if against not in ("iteration", "time"):
        raise ValueError(f'against must be "iteration" or "time", got {against!r}')
    metric, mode = analysis.require_metric()
    drawn = [curve for curve in series.curves(analysis) if len(curve.values)]
    ax = style.axes(ax)
    if not drawn:
        style.say_empty(ax, f"no trial has reported {metric}")
        return ax
    every = np.concatenate([curve.values for curve in drawn])
    length = 1.0
    if against == "time":
        length = style.time_axis(ax, max(float(np.nanmax(curve.elapsed_s)) for curve in drawn))
    else:
        style.count_axis(ax, "iteration")
    _draw_lines(ax, analysis, drawn, against, length)
    expected = _draw_expected(ax, analysis, drawn) if against == "iteration" else 0
    outside = style.metric_axis(ax, every, mode)
    ax.set_ylabel(metric)
    dashed = "dashed: as the search expects them to go on" if expected else ""
    said = [f"{len(drawn)} trials", style.direction(mode), outside, dashed]
    style.title(ax, f"{metric} of every trial", " · ".join(part for part in said if part))
    return ax


def _draw_lines(ax: Axes, analysis: Analysis, drawn: list[series.Curve], against: str, length: float) -> None:
    from matplotlib.collections import LineCollection

    tints = style.colours(len(drawn))
    best = analysis.best_trial.trial_id if analysis.has_best else None
    many = len(drawn) > style.FEW
    lines, shades, dots = [], [], []
    for tint, curve in zip(tints, drawn, strict=True):
        x = curve.iterations if against == "iteration" else curve.elapsed_s / length
        trial = analysis.trials[curve.trial]
        winner = trial.trial_id == best
        for attempt in np.unique(curve.attempts):
            part = curve.attempts == attempt
            points = np.column_stack([x[part], curve.values[part]])
            if not many or winner:
                first = attempt == curve.attempts[0]
                label = f"{trial.trial_id}{' (best)' if winner else ''}" if first else None
                ax.plot(
                    points[:, 0],
                    points[:, 1],
                    color=style.BEST if winner and many else tint,
                    label=label,
                    linewidth=2.4 if winner else 1.5,
                    marker="o",
                    markersize=3.5 if len(points) < 60 else 0,
                    zorder=5 if winner else 3,
                )
            elif len(points) == 1:
                dots.append((*points[0], tint))
            else:
                lines.append(points)
                shades.append(tint)
    # Against time trials lie side by side, against iterations on top of each other.
    alpha = float(np.clip(60 / max(len(drawn), 1), 0.4 if against == "time" else 0.12, 0.85))
    ax.add_collection(LineCollection(lines, colors=shades, linewidths=0.9, alpha=alpha, zorder=2))
    if dots:
        ax.scatter(
            [d[0] for d in dots], [d[1] for d in dots], c=[d[2] for d in dots], s=7, alpha=alpha, zorder=2
        )
    ax.autoscale_view()
    ax.legend(fontsize=8, frameon=False, loc="best")
    if many:
        _order_bar(ax, len(analysis.trials))


def _draw_expected(ax: Axes, analysis: Analysis, drawn: list[series.Curve]) -> int:
    """Draw how the trials are expected to go on that may; return how many these are."""
    expected = expectations(analysis)
    tints = dict(zip((curve.trial for curve in drawn), style.colours(len(drawn)), strict=True))
    alive = [n for n in expected if analysis.trials[n].status in ("RUNNING", "PAUSED", "PENDING")]
    alive = [number for number in alive if number in tints]
    for number in alive:
        one, tint = expected[number], tints[number]
        few = len(drawn) <= style.FEW
        ax.plot(one.iterations, one.middle, "--", color=tint, lw=1.2, alpha=1.0 if few else 0.4, zorder=2)
        if few:
            ax.fill_between(one.iterations, one.low, one.high, color=tint, alpha=0.12, lw=0, zorder=1)
    return len(alive)


def _order_bar(ax: Axes, count: int) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    bar = ax.figure.colorbar(
        ScalarMappable(Normalize(1, count), style.SEQUENTIAL), ax=ax, pad=0.02, aspect=30
    )
    bar.set_label("trial, in order of creation", fontsize=8.5)
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=8)


def best_so_far(
    analysis: Analysis | Mapping[str, Analysis | Sequence[Analysis]] | Sequence[Analysis],
    against: str = "time",
    ax: Axes | None = None,
) -> Axes:
    """Draw the best value so far against wall-clock "time" or the number of "trials".

    Several experiments are compared on one picture: a list (named by their folders) or a dictionary from
    name to analysis. A name with several analyses (a searcher's seeds) is drawn as their median and range.
    Raises `ValueError` where experiments differ in metric or mode.
    """
    groups = _groups(analysis)
    whats = {a.require_metric() for group in groups.values() for a in group}
    if len(whats) != 1:
        raise ValueError(f"experiments to compare must have one metric and mode, got {sorted(whats)}")
    metric, mode = whats.pop()
    ax = style.axes(ax)
    steps = {
        name: [s for s in (series.best_so_far(a, against) for a in group) if len(s[0])]
        for name, group in groups.items()
    }
    steps = {name: group for name, group in steps.items() if group}
    if not steps:
        style.say_empty(ax, f"no trial has reported a finite {metric}")
        return ax
    end = max(float(x[-1]) for group in steps.values() for x, _ in group)
    length = style.time_axis(ax, end) if against == "time" else 1.0
    if against == "trials":
        style.count_axis(ax, "trials")
    for tint, (name, group) in zip(style.colours(len(steps)), steps.items(), strict=True):
        _draw_group(ax, name, group, tint, length)
    ax.set_ylabel(f"best {metric} so far")
    if len(steps) > 1:
        ax.legend(fontsize=8.5, frameon=False)
    style.title(ax, f"Best {metric} so far", style.direction(mode))
    return ax


def _draw_group(
    ax: Axes, name: str, group: list[tuple[np.ndarray, np.ndarray]], tint: Any, length: float
) -> None:
    if len(group) == 1:
        x, y = group[0]
        ax.step(x / length, y, where="post", color=tint, linewidth=2, label=name)
        ax.plot(x[:-1] / length, y[:-1], "o", color=tint, markersize=3.5)
        return
    every = np.unique(np.concatenate([x for x, _ in group]))
    start = max(x[0] for x, _ in group)  # from where on each run has a value
    every = every[every >= start]
    held = np.stack([y[np.searchsorted(x, every, side="right") - 1] for x, y in group])
    ax.step(
        every / length,
        np.median(held, axis=0),
        where="post",
        color=tint,
        linewidth=2,
        label=f"{name} (median)",
    )
    ax.fill_between(
        every / length, held.min(axis=0), held.max(axis=0), step="post", color=tint, alpha=0.18, lw=0
    )


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
