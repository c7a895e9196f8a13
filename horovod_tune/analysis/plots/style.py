"""Colours, axes and texts that all plots share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from horovod_tune.analysis.open_experiment import Analysis
from horovod_tune.analysis.printable import digits_for, text_of
from horovod_tune.analysis.varying_parameters import Parameter

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Okabe and Ito, "Color Universal Design" (2008), in an order in which neighbours differ in lightness too.
OKABE_ITO = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#B3A200")
BEST = "#D55E00"
QUIET = "#8A8F98"
INK = "#20242A"
FEW = len(OKABE_ITO)
# Groups of trials, from the best on: name, cumulative share, and colour, from dark to light.
_GROUPS = (
    ("best 10 %", 0.1, "#00224E"),
    ("to 25 %", 0.25, OKABE_ITO[0]),
    ("to 50 %", 0.5, "#6F9FBF"),
    ("the rest", 1.0, "#B7AE8A"),
)
_TIME_UNITS = (("days", 86400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
_HOVER_PARAMETERS = 8
_HOVER_TRIALS = 1000  # for more trials, hover texts have no hyperparameters
_HEAD_PX = 84  # the height of the title, the subtitle, and the mode bar above them
_AXIS = {
    "gridcolor": "#E3E6EA",
    "linecolor": "#9AA0A8",
    "tickcolor": "#9AA0A8",
    "ticks": "outside",
    "zeroline": False,
    "automargin": True,
    "title": {"standoff": 10},
    "exponentformat": "power",
}
_TEMPLATE = {
    "font": {"family": "system-ui, sans-serif", "size": 12, "color": "#3B424D"},
    "colorway": OKABE_ITO,
    "paper_bgcolor": "white",
    "plot_bgcolor": "white",
    "hovermode": "closest",
    "hoverlabel": {"align": "left"},
    # Below the axes: at the top, the mode bar would cover it in a narrow figure.
    "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
    "xaxis": _AXIS,
    "yaxis": _AXIS,
    "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": QUIET, "activecolor": INK},
}


def figure(title: str, subtitle: str = "", *, height: int = 420, empty: str = "") -> Figure:
    """Return a figure in the package's style; `empty` is a text that explains why nothing is drawn."""
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise ImportError("plots need plotly: pip install 'horovod_tune[analysis]'") from error
    heading = {"text": title, "subtitle": {"text": subtitle}, "x": 0, "xref": "paper", "xanchor": "left"}
    made = go.Figure(
        layout={
            "template": {"layout": _TEMPLATE},
            "title": heading,
            "height": height,
            "margin": {"l": 20, "r": 20, "t": _HEAD_PX, "b": 20},
        }
    )
    if empty:
        made.update_layout(xaxis_visible=False, yaxis_visible=False)
        place = {"xref": "paper", "yref": "paper", "x": 0.5, "y": 0.5, "showarrow": False}
        made.add_annotation(text=as_text(empty), **place)
    return made


def as_text(words: object) -> str:
    """Return text escaped for Plotly, which interprets HTML and TeX in labels, and `%{…}` in hover texts.

    >>> as_text("<b>%{x} & $1$")
    '&lt;b&gt;%\\u200b{x} &amp; &#36;1&#36;'
    """
    return escape(str(words), quote=False).replace("%{", "%\u200b{").replace("$", "&#36;")


def label(words: str, longest: int = 32) -> str:
    """Return a name as the label of an axis, truncated if it is long."""
    return as_text(words if len(words) <= longest else words[: longest - 1] + "…")


def end_of(name: str, longest: int) -> str:
    """Return a name as a label; of a long one its end, since nested names often begin alike."""
    return as_text(name if len(name) <= longest else f"…{name[1 - longest :]}")


def joined(*parts: str) -> str:
    return " · ".join(part for part in parts if part)


def metric_axis(values: np.ndarray, mode: str, name: str, *, cut: bool = True) -> tuple[dict[str, Any], str]:
    """Return the metric's axis, and a note on the values that are outside it.

    The good end is always shown. If values far beyond the worse quartile (those of diverged trials) would
    flatten the rest, they are left out, or if they are positive and more than a tenth, the axis is
    logarithmic. Without `cut`, all values are on a linear axis.
    """
    sign = 1.0 if mode == "min" else -1.0
    costs = sign * values[np.isfinite(values)]
    axis: dict[str, Any] = {"title": {"text": label(name)}}
    if not len(costs):
        return axis | {"range": [0.0, 1.0]}, f"no value of {len(values)} is finite" if len(values) else ""
    kept, least = costs, costs.min()
    first, middle, third = map(float, np.quantile(costs, [0.25, 0.4, 0.75]))
    # If a quarter are far away, the third quartile is one of them. Then only values a thousand times as large
    # count, since the better ones may be very close to each other: the ends of learning curves.
    size = max(abs(middle), middle - least)
    for end, reach, flat in ((third, 3 * (third - first), 2), (middle, 3 * size, 333)):
        if cut and 0 < flat * reach < kept.max() - end:
            kept = costs[costs <= end + reach]
    log = len(costs) - len(kept) > 0.1 * len(costs) and bool((sign * costs > 0).all())
    low, high = sorted((sign * float(costs.max() if log else kept.max()), sign * float(least)))
    if log:
        low, high = math.log10(low), math.log10(high)
        axis |= log_axis(low, high)
    pad = 0.04 * (high - low) or abs(high) * 0.05 or 0.5
    axis |= {"range": [low - pad, high + pad]} | value_format(kept)
    beyond = 0 if log else len(costs) - len(kept)
    return axis, f"{beyond} of {len(values)} values are outside the axis" if beyond else ""


def value_format(values: np.ndarray) -> dict[str, Any]:
    """Return the formats of an axis that tell these values apart, when hovered over and at its ticks."""
    digits = digits_for(values, 5)
    hover = {"hoverformat": f".{digits}g"}
    return hover | {"tickformat": f".{digits}~g"} if digits > 6 else hover


def progress_axis(against: str, end: float) -> tuple[dict[str, Any], float]:
    """Return the axis of "time" up to `end` seconds, or else of a count, and the length of its unit."""
    if against == "time":
        unit, length = next((each for each in _TIME_UNITS if end >= 2 * each[1]), _TIME_UNITS[-1])
        return {"title": {"text": f"wall-clock time ({unit})"}, "rangemode": "tozero"}, length
    return {"title": {"text": against}, "tickformat": "d", "dtick": 1 if end <= 12 else None}, 1.0


def parameter_axis(parameter: Parameter) -> dict[str, Any]:
    """Return a hyperparameter's axis: logarithmic if its range is, with names if it is a choice."""
    low, high = parameter.limits()
    pad = 0.0 if parameter.kind == "category" else 0.03 * (high - low)
    axis: dict[str, Any] = {"title": {"text": label(parameter.name)}, "range": [low - pad, high + pad]}
    if parameter.kind == "category":
        every = max(1, len(parameter.categories) // 20)
        texts = [label(text, 14) for text in parameter.categories[::every]]
        return axis | {"tickvals": list(range(0, len(parameter.categories), every)), "ticktext": texts}
    return axis | (log_axis(low, high) if parameter.log else value_format(parameter.positions))


def log_axis(low: float, high: float) -> dict[str, Any]:
    """Return a logarithmic axis, with its ticks, for values from `10**low` to `10**high`.

    >>> log_axis(-2.1, -0.5)["ticktext"]
    ['0.01', '0.02', '0.05', '0.1', '0.2']
    """
    # Plotly writes the ticks between two decades as "2" and "5", too small to read, and Plotly 6 draws some
    # decades at y = -Infinity.
    decades = range(math.floor(low), math.ceil(high) + 1, max(1, round((high - low) / 6)))
    few, more, most = (1, 2, 5), (1, 2, 3, 5), (1, 1.5, 2, 3, 4, 6, 8)
    span = high - low
    steps = (1,) if span > 2 else few if span > 1.3 else more if span > 0.7 else most
    values = [step * 10.0**decade for decade in decades for step in steps]
    inside = [value for value in values if low - 1e-9 <= math.log10(value) <= high + 1e-9]
    texts = [f"{value:.6g}" for value in inside]
    return {"type": "log"} | ({"tickvals": inside, "ticktext": texts} if len(inside) > 1 else {})


def on_axis(parameter: Parameter) -> np.ndarray:
    """Return the trials' positions on `parameter_axis`, shape (trials,); those of a choice are jittered."""
    if parameter.kind == "category":
        return parameter.positions + np.random.default_rng(0).uniform(-0.18, 0.18, len(parameter.values))
    return 10.0**parameter.positions if parameter.log else parameter.positions


@lru_cache(maxsize=1)  # an analysis never changes
def hover_texts(analysis: Analysis) -> np.ndarray:
    """Return the hover text of each trial: its id, status and first hyperparameters."""
    if len(analysis.trials) > _HOVER_TRIALS:
        return trial_names(analysis)
    lines = [[f"{as_text(trial.trial_id)}, {as_text(trial.shown_status)}" for trial in analysis.trials]]
    for one in analysis.varying_parameters[:_HOVER_PARAMETERS]:
        name = f"<br>{label(one.name)} = "  # a trial that lacks it has no such line
        lines.append([name + label(text_of(v), 60) if v is not None else "" for v in one.values])
    return np.array(["".join(texts) for texts in zip(*lines, strict=True)])


@lru_cache(maxsize=1)  # an analysis never changes
def trial_names(analysis: Analysis) -> np.ndarray:
    """Return the trials' ids escaped for Plotly, shape (trials,): an array is much faster than a list."""
    return np.array([as_text(trial.trial_id) for trial in analysis.trials])


def direction(mode: str) -> str:
    return "lower is better" if mode == "min" else "higher is better"


def faded(colour: str, alpha: float) -> str:
    from plotly.colors import hex_to_rgb

    return f"rgba{(*hex_to_rgb(colour), round(alpha, 3))}"


def by_rank(ranked: Sequence[int], reach: float) -> list[tuple[str, str, str, list[int]]]:
    """Return groups of trials, worst first: name, colour, a colour that is fainter for many, and trials."""
    alpha = float(np.clip(reach / max(len(ranked), 1), 0.15, 0.9))
    ends = [math.ceil(share * len(ranked)) for _, share, _ in _GROUPS]
    groups = [
        (name, colour, faded(colour, alpha), list(ranked[start:end]))
        for (name, _, colour), start, end in zip(_GROUPS, [0, *ends], ends, strict=False)
    ]
    return [group for group in reversed(groups) if group[3]]


def legend_entry(name: str, colour: str, width: float) -> dict[str, Any]:
    """Return a trace that only puts a group of that name into the legend, in its full colour."""
    look = {"mode": "lines", "line": {"color": colour, "width": width}, "showlegend": True}
    return look | {"x": [None], "y": [None], "name": name, "legendgroup": name}


def together(lines: Sequence[np.ndarray], texts: np.ndarray, template: str) -> dict[str, Any]:
    """Return lines as one trace with gaps between them, as a trace for each would be slow to draw.

    `lines` have shape (points, 2); all points of a line have its text when they are hovered over.
    """
    gap = np.full((1, 2), np.nan)
    x, y = np.concatenate([part for line in lines for part in (line, gap)])[:-1].T
    hover = np.repeat(texts, [len(line) + 1 for line in lines])[:-1]
    return {"x": x, "y": y, "text": hover, "hovertemplate": f"{template}<extra></extra>"}
