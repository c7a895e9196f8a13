"""What the scheduler and the cluster did: rungs and stops, and who held which ranks when."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from horovod_tune.analysis import series
from horovod_tune.analysis.plots import style
from horovod_tune.analysis.results import Analysis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_FATES = (  # marks differ in shape as well as in colour
    ("went on", style.OKABE_ITO[0], "o"),
    ("stopped", style.OKABE_ITO[1], "X"),
    ("failed", style.OKABE_ITO[6], "v"),
    ("running", style.OKABE_ITO[2], "D"),
)


def rungs(analysis: Analysis, ax: Axes | None = None) -> Axes:
    """Draw the trials at each rung of ASHA or HyperBand: who went on and who was stopped there.

    Rungs are the scheduler's own where the experiment says them, else the iterations at which trials ended
    (the picture says which).
    """
    metric, mode = analysis.require_metric()
    found = series.rungs(analysis)
    ax = style.axes(ax)
    if not found:
        style.say_empty(ax, f"no trial has reported {metric}")
        return ax
    every = np.concatenate([np.array(rung.values) for rung in found])
    rng = np.random.default_rng(0)
    size = float(np.clip(1200 / max(len(rung.trials) for rung in found), 6, 40))
    for fate, colour, mark in _FATES:
        xs, ys = [], []
        for place, rung in enumerate(found):
            inside = [v for v, f in zip(rung.values, rung.fates, strict=True) if f == fate]
            side = -0.16 if fate == "went on" else 0.16
            xs += list(place + side + rng.uniform(-0.12, 0.12, len(inside)))
            ys += inside
        if xs:
            ax.scatter(
                xs, ys, s=size, marker=mark, color=colour, alpha=0.6, linewidths=0, label=fate, zorder=3
            )
    outside = style.metric_axis(ax, every, mode)
    ax.set_xticks(
        range(len(found)), [f"{r.iteration}\n{len(r.trials)} came\n{r.count('went on')} on" for r in found]
    )
    ax.set_xlabel("iteration of the rung")
    ax.set_ylabel(f"{metric} at the rung")
    ax.legend(fontsize=8.5, frameon=False, ncols=4, loc="upper right")
    known = "the scheduler's rungs" if analysis.record.rungs else "rungs not written down: where trials ended"
    style.title(ax, "Rungs and stops", " · ".join(part for part in (known, outside) if part))
    return ax


def timeline(analysis: Analysis, ax: Axes | None = None) -> Axes:
    """Draw which trial held which ranks when, with the time that its start took hatched.

    A row is a rank's place (on its host where the reports say it); where they do not tell the number of
    ranks, a row is a place for one trial. Trials on a row alternate between two tones, failed ones are black,
    the best one orange.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Patch

    found = series.timeline(analysis)
    ax = style.axes(ax, 8.0, float(np.clip(1.2 + 0.26 * len(found.rows), 2.6, 9.0)))
    if not found.bars:
        style.say_empty(ax, "no trial has begun")
        return ax
    length = style.time_axis(ax, max(bar.end for bar in found.bars))
    best = analysis.trials.index(analysis.best_trial) if analysis.has_best else -1
    boxes, tints, starts = [], [], []
    drawn = [0] * len(found.rows)
    for bar in found.bars:
        failed = analysis.trials[bar.trial].status == "ERROR"
        drawn[bar.row] += 1
        tone = style.OKABE_ITO[0] if drawn[bar.row] % 2 else style.OKABE_ITO[4]
        tints.append(style.BEST if bar.trial == best else "#20242A" if failed else tone)
        boxes.append(_box(bar.trained, bar.end, bar.row, length))
        if bar.trained > bar.begin:
            starts.append(_box(bar.begin, bar.trained, bar.row, length))
    few = len(found.bars) < 400
    ax.add_collection(
        PolyCollection(boxes, facecolors=tints, edgecolors="white", linewidths=0.4 if few else 0)
    )
    ax.add_collection(
        PolyCollection(
            starts, facecolors="#F0E442", edgecolors="#5B5300", linewidths=0.4, hatch="////" if few else None
        )
    )
    ax.autoscale_view()
    ax.set_xlim(left=min(0.0, min(bar.begin for bar in found.bars) / length))
    ax.set_ylim(len(found.rows) - 0.4, -0.6)
    every = max(1, len(found.rows) // 32)
    names = [style.words(name or "·") for name in found.rows[::every]]
    ax.set_yticks(range(0, len(found.rows), every), names, fontsize=8)
    ax.set_ylabel(found.unit)
    ax.grid(axis="y", visible=False)
    handles = [Patch(color=style.OKABE_ITO[0], label="training")]
    if starts:
        handles.append(Patch(facecolor="#F0E442", edgecolor="#5B5300", hatch="////", label="starting up"))
    if best >= 0:
        handles.append(Patch(color=style.BEST, label="best trial"))
    if any(trial.status == "ERROR" for trial in analysis.trials):
        handles.append(Patch(color="#20242A", label="failed"))
    ax.legend(handles=handles, fontsize=8.5, frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    style.title(ax, "Who held which ranks when", "start-up time is not known" if not starts else "")
    return ax


def _box(begin: float, end: float, row: int, length: float) -> list[tuple[float, float]]:
    low, high, left, right = row - 0.4, row + 0.4, begin / length, end / length
    return [(left, low), (right, low), (right, high), (left, high)]
