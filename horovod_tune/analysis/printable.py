"""Text of an experiment's values: safe for a terminal, curves in one line, configurations to paste."""

from __future__ import annotations

import math
import pprint
import re
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

import numpy as np

# Control characters (an escape sequence can clear the screen, set the clipboard, hide a line), and those that
# reverse the direction of text, which can make a line read as another one.
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_BREAKS = re.compile("[\t\n]")


def printable(text: str) -> str:
    r"""Return a text, of one or more lines, with its control characters escaped.

    >>> print(printable("\x1b[2J" + "gone"))
    \x1b[2Jgone
    """
    return _STEERING.sub(_written_out, text)


def one_line(text: str) -> str:
    r"""Return a text as one line, with control characters, tabs and line breaks escaped.

    >>> print(one_line("a" + chr(10) + "b"))
    a\nb
    """
    return _BREAKS.sub(_written_out, printable(text))


def _written_out(character: re.Match[str]) -> str:
    return character[0].encode("unicode_escape").decode("ascii")


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "trial"), counted(2000, "trial")
    ('1 trial', '2,000 trials')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def text_of(value: Any) -> str:
    """Return a value as text, short for floats.

    >>> text_of(0.1 + 0.2), text_of(True), text_of("adam")
    ('0.3', 'True', 'adam')
    """
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def duration(seconds: float) -> str:
    """
    >>> duration(3.21), duration(95), duration(3 * 3600 + 120), duration(200_000)
    ('3.2 s', '1 min 35 s', '3 h 2 min', '2 d 7 h')
    """
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def moment(unix_s: float) -> str:
    """
    >>> moment(0)
    '1970-01-01 00:00:00 UTC'
    """
    return datetime.fromtimestamp(unix_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def digits_for(values: Sequence[float] | np.ndarray, least: int) -> int:
    """Return how many significant digits tell typical values apart, at least `least`.

    >>> digits_for([0.25, 0.5], 5), digits_for([1e8, 1e8 + 20], 5)
    (5, 11)
    """
    finite = np.asarray(values, dtype=float)
    finite = finite[np.isfinite(finite)]
    if not len(finite):
        return least
    with np.errstate(over="ignore"):  # values near the largest float
        # A diverged trial must not hide how close the others are.
        apart = float(np.subtract(*np.quantile(finite, [0.75, 0.25])) or np.ptp(finite))
        size = float(np.abs(finite).max()) if apart == np.ptp(finite) else float(np.abs(np.median(finite)))
    if not 0 < apart < size < math.inf:
        return least
    return min(17, max(least, math.ceil(math.log10(size / apart)) + 3))


_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float] | np.ndarray, width: int = 20) -> str:
    """Return values as at most `width` blocks, each the mean of a stretch's finite values, or a dot.

    >>> sparkline([0, 1, 2, 3, float("nan"), 7])
    '▁▂▃▄·█'
    """
    parts = np.array_split(np.asarray(values, dtype=float), min(width, len(values)) or 1)
    finite = [part[np.isfinite(part)] for part in parts]
    with np.errstate(over="ignore", invalid="ignore"):  # values near the largest float
        means = np.array([part.mean() if len(part) else math.nan for part in finite])
        present = means[np.isfinite(means)]
        if not len(present):
            return "·" * len(values[:width])
        heights = (means - present.min()) / ((present.max() - present.min()) or 1.0) * (len(_BLOCKS) - 1)
    return "".join("·" if math.isnan(height) else _BLOCKS[round(height)] for height in heights)


def python_text(config: dict[str, Any]) -> str:
    """Return a configuration as a Python statement that can be run.

    >>> print(python_text({"lr": 0.1, "clip": float("inf")}))
    config = {'lr': 0.1, 'clip': float('inf')}
    """
    prefix = "config = "
    text = _ConfigPrinter(sort_dicts=False, width=68).pformat(config)
    return prefix + text.replace("\n", "\n" + " " * len(prefix))


class _ConfigPrinter(pprint.PrettyPrinter):
    """Prints infinities and NaN, which have no literal in Python, as calls of `float`."""

    def format(self, value: Any, context: Any, maxlevels: int, level: int) -> tuple[str, bool, bool]:
        if isinstance(value, float) and not math.isfinite(value):
            return f"float('{value}')", True, False
        return super().format(value, context, maxlevels, level)


def yaml_text(config: dict[str, Any]) -> str:
    """Return a configuration as YAML."""
    import yaml

    return str(yaml.safe_dump(config, sort_keys=False, default_flow_style=False, allow_unicode=True)).rstrip()
