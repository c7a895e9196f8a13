"""The report: one self-contained HTML page, made from `page.html`, a Jinja template."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from horovod_tune.analysis import plots, run_summary
from horovod_tune.analysis.open_experiment import Analysis
from horovod_tune.analysis.printable import counted, duration, moment, python_text, text_of, yaml_text
from horovod_tune.analysis.trial_details import error_line, iterations_of, ranks_of

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_PARAMETERS = 24  # at most this many hyperparameters get a plot of their own
_BUTTONS = [["toImage", "zoom2d", "pan2d", "resetScale2d"]]
_CONFIG = {"displaylogo": False, "responsive": True, "scrollZoom": False, "modeBarButtons": _BUTTONS}
_MODE_BAR_PX = 32  # above the axes, so that the bar covers none of the points
_SCRIPT = re.compile(r"<script(?: [^>]*)?>(.*?)</script>", re.DOTALL)


def write_report(
    analysis: Analysis, path: str | os.PathLike[str], *, pareto: Mapping[str, str] | None = None
) -> Path:
    """Write the experiment's report to one HTML file and return its path; see `render`. Raises `OSError`."""
    place = Path(path).expanduser()
    place.write_text(render(analysis, pareto=pareto), encoding="utf-8")
    return place


def render(analysis: Analysis, *, pareto: Mapping[str, str] | None = None) -> str:
    """Return the report as one HTML page that loads nothing else.

    `pareto` maps metrics to modes, as in `Analysis.pareto_front`, and adds a section on them; by default they
    are those of `BayesOptSearch`, if it optimised several. Raises `ValueError` as that method does.

    The page's content security policy allows no network access, and only its own scripts (by hash).
    """
    from jinja2 import Environment
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    named = (*analysis.record.front, *(limit.metric for limit in analysis.limits))
    if pareto is None and all(map(analysis.is_known, named)):
        pareto = analysis.record.front
    front = analysis.pareto_front(pareto) if pareto else None
    varying = analysis.varying_parameters if analysis.best_number is not None else []
    scripts = [get_plotlyjs(), _asset("sort.js")]

    def card(figure: Figure, min_width: int = 0) -> Markup:
        drawn = _card(figure, len(scripts), min_width)
        scripts.extend(_SCRIPT.findall(drawn))
        return Markup(drawn)

    parts: dict[str, Any] = {"progress": [], "trade_off": "", "space": [], "parameters": []}
    if analysis.best_number is not None:
        parts["progress"] = [card(figure) for figure in _progress(analysis)]
    if front is not None and len(front.metrics) == 2 and len(front.members):
        parts["trade_off"] = card(plots.pareto_front(analysis, front.metrics))
    if varying:
        parallel = card(plots.parallel_coordinates(analysis), min_width=(len(varying) + 1) * 92)
        parts["space"] = [parallel, card(plots.importance(analysis))]
        parts["parameters"] = [card(plots.parameter(analysis, one.name)) for one in varying[:_PARAMETERS]]
    parts["schedule"] = card(plots.timeline(analysis))
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    hashes = " ".join(f"'sha256-{digest}'" for digest in digests)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src {hashes}"
    texts = {"policy": policy, "style": _asset("page.css"), "plotly": scripts[0], "sort": scripts[1]}
    page = Environment(autoescape=True, keep_trailing_newline=True).from_string(_asset("page.html"))
    return page.render(
        parts,
        **{name: Markup(text) for name, text in texts.items()},
        analysis=analysis,
        front=front,
        tiles=_tiles(analysis),
        columns=_columns(analysis),
        cell=_cell,
        failures=_failures(analysis),
        left_out=max(0, len(varying) - _PARAMETERS),
        summary=run_summary.run_summary(analysis),
        space_domains=_space(analysis),
        made=f"Made by horovod_tune {metadata.version('horovod_tune')} on {moment(time.time())}.",
        counted=counted,
        value_text=analysis.value_text,
        python_text=python_text,
        yaml_text=yaml_text,
        text_of=text_of,
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _card(figure: Figure, number: int, min_width: int) -> str:
    """Return a figure with its title and subtitle as text of the page, which wraps on a phone."""
    title, note = figure.layout.title.text or "", figure.layout.title.subtitle.text or ""
    figure.update_layout(
        title=None,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 4, "r": 8, "t": _MODE_BAR_PX, "b": 4},
        height=figure.layout.height - figure.layout.margin.t + _MODE_BAR_PX,
    )
    drawn = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        config=_CONFIG,
        div_id=f"figure-{number}",
        default_height=f"{figure.layout.height}px",
    )
    wide = f' style="min-width:{min_width}px"' if min_width else ""
    # Title and note are escaped already, as Plotly requires.
    note = f'<p class="note">{note}</p>' if note else ""
    inner = f'<div class="scroll"><div{wide}>{drawn}</div></div>'
    return f'<div class="card"><h3>{title}</h3>{inner}{note}</div>'


def _progress(analysis: Analysis) -> list[Figure]:
    drawn = {
        "Best so far": plots.best_so_far(analysis),
        "Learning curves over iterations": plots.learning_curves(analysis),
        "Best so far over trials": plots.best_so_far(analysis, "trials"),
        "Learning curves over time": plots.learning_curves(analysis, "time"),
    }
    return [figure.update_layout(title_text=title) for title, figure in drawn.items()]


def _tiles(analysis: Analysis) -> list[tuple[str, str, str]]:
    (cpu, gpu, timed), wall = run_summary.usage(analysis), run_summary.wall_text(analysis)
    count, noun = counted(len(analysis.trials), "trial").split()
    tiles = [(noun, count, run_summary.statuses(analysis))]
    if wall is not None:
        tiles.append(("wall time", wall, moment(analysis.record.start_time or 0.0)))
    if timed:
        more = f"{duration(gpu)} of GPU" if gpu else "no GPU"
        tiles.append(("reserved CPU time", duration(cpu), more))
    return tiles


def _space(analysis: Analysis) -> list[tuple[str, str]]:
    """Return the search space and its constants as text; empty if it is not recorded."""
    domains, constants = analysis.record.domains, analysis.record.constants
    constant = [(name, f"{value!r} (constant)"[:300]) for name, value in constants.items()]
    return [(name, domain.text) for name, domain in domains.items()] + constant if domains else []


def _failures(analysis: Analysis) -> list[tuple[str, list[str], str]]:
    """Return each kind of failure, most common first: its line, the trials' ids, the first trial's text."""
    errors = analysis.errors()
    groups: dict[str, list[str]] = {}
    for trial_id, text in errors.items():
        groups.setdefault(error_line(text) or "", []).append(trial_id)
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    return [(line, ids, errors[ids[0]]) for line, ids in ordered]


# A column's name, its values, and what formats them if it sorts by number; otherwise they are texts.
_Column = tuple[str, Sequence[Any], Callable[[Any], str] | None]


def _columns(analysis: Analysis) -> list[_Column]:
    """Return the columns of the table of trials."""
    trials = analysis.trials
    columns: list[_Column] = [
        ("trial", [trial.trial_id for trial in trials], None),
        ("status", [trial.shown_status for trial in trials], None),
    ]
    if analysis.is_scored:
        shown = partial(analysis.value_text, digits=5)
        columns.append((analysis.metric or "", analysis.scores["last"].tolist(), shown))
        columns.append((f"best {analysis.metric}", analysis.scores["best"].tolist(), shown))
        columns.append(("at iteration", analysis.scores["best_iteration"].tolist(), str))
    columns += [(name, values, _short) for name, values in analysis.unranked().items()]
    trained = (analysis.spans["end"] - analysis.spans["trained"]).groupby(analysis.spans["trial"]).sum()
    columns.append(("iterations", [iterations_of(trial) for trial in trials], str))
    columns.append(("time", trained.reindex(range(len(trials))).tolist(), duration))
    if any(ranks := [ranks_of(trial) for trial in trials]):
        columns.append(("ranks", ranks, str))
    for one in analysis.varying_parameters:
        numeric = one.kind == "numeric" or all(type(v) in (int, float, type(None)) for v in one.values)
        columns.append((one.name, one.values, _short if numeric else None))
    if errors := analysis.errors():
        columns.append(("error", [error_line(errors.get(trial.trial_id)) for trial in trials], None))
    return columns


def _cell(value: Any, shown: Callable[[Any], str] | None) -> tuple[str, str]:
    """Return a value as text, and the number by which it is sorted."""
    if value is None or value is pd.NA or value != value:
        return "", ""
    if shown is None:
        return text_of(value)[:300], ""
    # The page cannot parse "inf", nor subtract infinity from itself.
    exact = f"{min(max(value, -1e308), 1e308):.9g}" if isinstance(value, float) else str(value)
    return shown(value), exact


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
