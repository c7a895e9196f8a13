"""The report's section about several metrics at once: the front as a table, two metrics as a picture."""

from __future__ import annotations

from html import escape

import numpy as np

from horovod_tune.analysis.pareto import ParetoFront
from horovod_tune.analysis.varying_parameters import text_of

_WIDTH, _HEIGHT, _EDGE = 640, 320, 48
_MOST_POINTS, _MOST_ROWS = 3000, 100


def trade_offs(front: ParetoFront) -> str:
    """Return the section as HTML without scripts."""
    if not front.on_front.any():
        return '<p class="none">No result has a finite value of each of these metrics.</p>'
    picture = _picture(front) if len(front.metrics) == 2 else ""
    return f'<p class="said">{escape(_summary(front))}</p>{picture}{_table(front)}'


def _summary(front: ParetoFront) -> str:
    words = {"min": "lower", "max": "higher"}
    aims = ", ".join(f"{name} ({words[mode]})" for name, mode in front.metrics.items())
    worst = zip(front.metrics, front.reference, strict=True)
    corner = ", ".join(f"{name} {value:.6g}" for name, value in worst)
    return (
        f"Better is: {aims}. {int(front.on_front.sum())} of {len(front.points):,} results are beaten by no "
        f"other one in all of them; they dominate a hypervolume of {front.hypervolume():.6g} up to the "
        f"worst of each ({corner})."
    )


def _table(front: ParetoFront) -> str:
    table = front.dataframe()
    names = [str(name).removeprefix("config/") for name in table.columns]
    heads = "".join(f"<th scope=col>{escape(name)}</th>" for name in names)
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(text_of(value))}</td>' for value in row)}</tr>"
        for row in table.head(_MOST_ROWS).itertuples(index=False)
    )
    left = len(table) - _MOST_ROWS
    more = f'<p class="said">and {left} more</p>' if left > 0 else ""
    return (
        f'<div class="scroll"><table class="facts"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{more}"
    )


def _picture(front: ParetoFront) -> str:
    finite = np.flatnonzero(np.isfinite(front.points).all(axis=1)).tolist()
    low, high = front.points[finite].min(axis=0), front.points[finite].max(axis=0)
    # Halves first: the distance of two finite numbers may not be one.
    span = np.where(high / 2 > low / 2, high / 2 - low / 2, 0.5)
    others = [place for place in finite if not front.on_front[place]][:_MOST_POINTS]

    def dot(place: int, name: str, radius: int) -> str:
        part = (front.points[place] / 2 - low / 2) / span
        x = _EDGE + part[0] * (_WIDTH - 2 * _EDGE)
        y = _HEIGHT - _EDGE - part[1] * (_HEIGHT - 2 * _EDGE)
        trial = escape(front.analysis.trials[front.trials[place]].trial_id)
        values = ", ".join(f"{value:.6g}" for value in front.points[place])
        shown = f"<title>{trial}: {values}</title>"
        return f'<circle class="{name}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">{shown}</circle>'

    dots = "".join(dot(place, "other", 3) for place in others)
    dots += "".join(dot(place, "front", 5) for place in front.members)
    x_name, y_name = (escape(name) for name in front.metrics)
    ends = [f"{value:.4g}" for value in (low[0], high[0], low[1], high[1])]
    bottom, right = _HEIGHT - _EDGE + 18, _WIDTH - _EDGE
    return (
        f'<svg class="front-plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{x_name} against {y_name}, the front in orange">{dots}'
        f'<text x="{_EDGE}" y="{bottom}">{ends[0]}</text>'
        f'<text x="{right}" y="{bottom}" text-anchor="end">{ends[1]}</text>'
        f'<text x="{_WIDTH / 2:.0f}" y="{bottom + 14}" text-anchor="middle">{x_name}</text>'
        f'<text x="4" y="{_HEIGHT - _EDGE}">{ends[2]}</text><text x="4" y="{_EDGE}">{ends[3]}</text>'
        f'<text x="4" y="{_EDGE - 18}">{y_name}</text></svg>'
    )
