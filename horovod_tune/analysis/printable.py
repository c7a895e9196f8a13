"""Values of an experiment as text: safe for a terminal, a curve in one line, a configuration to paste."""

from __future__ import annotations

import math
import pprint
import re
from collections.abc import Sequence
from typing import Any

# Control characters (an escape sequence can clear the screen, set the clipboard, hide a line), and those that
# turn the direction of text round, so that a line reads as another one.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_BREAKS = re.compile("[\t\n]")


def printable(text: str) -> str:
    r"""Return a text of any number of lines with its control characters written out.

    >>> print(printable("\x1b[2J" + "gone"))
    \x1b[2Jgone
    """
    return _STEERING.sub(_written_out, text)


def one_line(text: str) -> str:
    r"""Return a text that stays within its line.

    >>> print(one_line("a" + chr(10) + "b"))
    a\nb
    """
    return _BREAKS.sub(_written_out, printable(text))


def _written_out(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode("ascii")


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


def python_text(config: dict[str, Any]) -> str:
    """Return a configuration as a Python statement that can be run.

    >>> print(python_text({"lr": 0.1, "clip": float("inf")}))
    config = {'lr': 0.1, 'clip': float('inf')}
    """
    prefix = "config = "
    text = pprint.pformat(_Odd.wrap(config), sort_dicts=False, width=68)
    return prefix + text.replace("\n", "\n" + " " * len(prefix))


class _Odd:
    """A float that has no literal in Python."""

    def __init__(self, value: float):
        self.value = value

    def __repr__(self) -> str:
        return f"float('{self.value}')"

    @classmethod
    def wrap(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cls.wrap(inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [cls.wrap(inner) for inner in value]
        return cls(value) if isinstance(value, float) and not math.isfinite(value) else value


def yaml_text(config: dict[str, Any]) -> str:
    """Return a configuration as YAML."""
    import yaml

    return str(yaml.safe_dump(config, sort_keys=False, default_flow_style=False, allow_unicode=True)).rstrip()
