"""A curve in one line of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(
    values: Sequence[float], width: int = 20, low: float | None = None, high: float | None = None
) -> str:
    """Return values as at most `width` blocks, higher ones taller; what is not finite is a dot.

    Longer curves are cut into stretches of equal length and drawn by their means. `low` and `high` are the
    scale's ends, the curve's own unless given (to compare several); values beyond are drawn at the end.

    >>> sparkline([0, 1, 2, 3, float("nan"), 7])
    '▁▂▃▄·█'
    """
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    kept = _shortened([float(value) for value in values], width)
    finite = [value for value in kept if math.isfinite(value)]
    if not finite:
        return "·" * len(kept)
    bottom = min(finite) if low is None else low
    top = max(finite) if high is None else high
    span = top - bottom
    drawn = []
    for value in kept:
        if not math.isfinite(value):
            drawn.append("·")
            continue
        part = min(1.0, max(0.0, (value - bottom) / span)) if span > 0 else 0.0
        drawn.append(_BLOCKS[round(part * (len(_BLOCKS) - 1))])
    return "".join(drawn)


def _shortened(values: list[float], width: int) -> list[float]:
    if len(values) <= width:
        return values
    means = []
    for stretch in range(width):
        inside = values[stretch * len(values) // width : (stretch + 1) * len(values) // width]
        finite = [value for value in inside if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    return means
