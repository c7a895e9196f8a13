"""Several metrics at once: the results that no other one beats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from horovod_tune.analysis.plots import style
from horovod_tune.analysis.results import Analysis

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def pareto_front(analysis: Analysis, metrics: Mapping[str, str], ax: Axes | None = None) -> Axes:
    """Draw every result by two metrics, and the front of those that no other one beats in both.

    `metrics` maps two metrics to "min" or "max"; the first is the horizontal axis. The stepped line is the
    border of what the front dominates.
    """
    if len(metrics) != 2:
        raise ValueError(f"a picture has two metrics, got {len(metrics)}: {', '.join(metrics)}")
    found = analysis.pareto_front(metrics)
    (x, x_mode), (y, y_mode) = metrics.items()
    ax = style.axes(ax)
    finite = np.isfinite(found.points).all(axis=1)
    if not finite.any():
        style.say_empty(ax, f"no trial has reported a finite {x} and {y}")
        return ax
    rest = finite & ~found.on_front
    others = found.points[rest]
    ax.scatter(
        others[:, 0], others[:, 1], s=16, color=style.QUIET, alpha=0.6, linewidths=0, label="other results"
    )
    front = found.points[found.members]
    # The best of x comes first; until the next one's x is reached, its y is the best there is.
    ax.step(front[:, 0], front[:, 1], where="post", color=style.BEST, linewidth=1.4, zorder=3)
    ax.scatter(front[:, 0], front[:, 1], s=34, color=style.BEST, zorder=4, label="front")
    ax.set_xlabel(f"{x} ({style.direction(x_mode)})")
    ax.set_ylabel(f"{y} ({style.direction(y_mode)})")
    ax.legend(fontsize=8.5, frameon=False)
    style.title(ax, f"{x} against {y}", f"{len(front)} of {int(finite.sum())} results are not dominated")
    return ax
