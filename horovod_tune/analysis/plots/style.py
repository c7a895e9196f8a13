"""Colours, axes and scales that all pictures share. The one place that imports matplotlib's pyplot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_tune.analysis.series import robust_limits

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito, "Color Universal Design" (2008), in an order in which neighbours differ in lightness too.
OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#B3A200")
BEST = "#D55E00"
QUIET = "#8A8F98"
FEW = len(OKABE_ITO)
SEQUENTIAL = "cividis"


def pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'horovod_tune[analysis]'") from error
    return plt


def axes(ax: Axes | None, width: float = 7.2, height: float = 4.2) -> Axes:
    """The given axes or new ones, with the frame taken off and a quiet grid."""
    if ax is None:
        ax = pyplot().subplots(figsize=(width, height), layout="constrained")[1]
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color("#9AA0A8")
    ax.grid(True, color="#E3E6EA", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.tick_params(color="#9AA0A8", labelsize=9)
    return ax


def title(ax: Axes, text: str, small: str = "") -> None:
    ax.set_title(text, loc="left", fontsize=11, fontweight="bold", pad=20 if small else 8)
    if small:
        ax.text(0, 1.02, small, transform=ax.transAxes, fontsize=8.5, color="#5B616A", va="bottom")
    _as_written(ax)


def metric_axis(ax: Axes, values: np.ndarray, mode: str, vertical: bool = True) -> str:
    """Set the metric's limits; return what to say of values that lie beyond them."""
    low, high, beyond = robust_limits(values, mode)
    (ax.set_ylim if vertical else ax.set_xlim)(low, high)
    return f"{beyond} of {len(values)} values lie outside" if beyond else ""


def time_axis(ax: Axes, seconds: float) -> float:
    """Label the x axis with a unit that suits so many seconds; return what to divide by."""
    units = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
    name, length = next((unit for unit in units if seconds >= 2 * unit[1]), units[-1])
    ax.set_xlabel(f"wall-clock time ({name})")
    return length


def count_axis(ax: Axes, name: str) -> None:
    """Label the x axis with something counted: only whole numbers get a mark."""
    from matplotlib.ticker import MaxNLocator

    ax.set_xlabel(name)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))


def say_empty(ax: Axes, text: str) -> None:
    """Write into axes that have nothing to show why."""
    ax.set_axis_off()
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color="#5B616A", wrap=True)
    _as_written(ax)


def _as_written(ax: Axes) -> None:
    """Let no text of the picture be read as a formula (`a$b$`), but for the marks of logarithmic axes."""
    from matplotlib.text import Text

    marks = {*ax.get_xticklabels(), *ax.get_yticklabels()}
    for text in ax.findobj(Text):
        if text not in marks:
            text.set_parse_math(False)  # type: ignore[attr-defined]


def words(text: str) -> str:
    r"""A name from an experiment as the text of a mark or of a colour bar, where formulas are read.

    >>> print(words("a$b"))
    a\$b
    """
    return text.replace("$", r"\$")


def direction(mode: str) -> str:
    return "lower is better" if mode == "min" else "higher is better"


def colours(count: int) -> list[Any]:
    """One colour a thing: distinct for a few, a sequence from dark to light for many."""
    if count <= FEW:
        return list(OKABE_ITO[:count])
    # Not up to the end: the lightest yellow is lost on white.
    return list(pyplot().get_cmap(SEQUENTIAL)(np.linspace(0, 0.93, count)))


def shade(values: np.ndarray, mode: str) -> tuple[Any, Any]:
    """A colour norm and map for the metric in which the best values are the darkest."""
    from matplotlib.colors import Normalize

    low, high, _ = robust_limits(values, mode)
    return Normalize(low, high, clip=True), pyplot().get_cmap(SEQUENTIAL + ("_r" if mode == "max" else ""))
