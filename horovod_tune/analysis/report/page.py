"""Puts the page together: texts, Plotly's figures, the table, and the security policy that fits them."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Mapping
from html import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from horovod_tune.analysis import plots
from horovod_tune.analysis.report import sections
from horovod_tune.analysis.results import Analysis
from horovod_tune.analysis.varying_parameters import varying_parameters

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_PARAMETERS = 24  # more hyperparameters than this have no picture of their own
_BUTTONS = [["toImage", "zoom2d", "pan2d", "resetScale2d"]]
_CONFIG = {"displaylogo": False, "responsive": True, "scrollZoom": False, "modeBarButtons": _BUTTONS}
_SCRIPT = re.compile(r"<script(?: [^>]*)?>(.*?)</script>", re.DOTALL)


def write_report(
    analysis: Analysis, path: str | os.PathLike[str], *, pareto: Mapping[str, str] | None = None
) -> Path:
    """Write the experiment's report to one HTML file and return its path; see `render`."""
    place = Path(path).expanduser()
    place.write_text(render(analysis, pareto=pareto), encoding="utf-8")
    return place


def render(analysis: Analysis, *, pareto: Mapping[str, str] | None = None) -> str:
    """Return the report as one HTML page that loads nothing.

    With `pareto`, metrics and their modes as `Analysis.pareto_front` takes them, it has a section on them; so
    it has if `BayesOptSearch` looked for several metrics.

    Its content security policy allows no network, and no script but its own (by hash).
    """
    from plotly.offline import get_plotlyjs

    figures = _Figures()
    parts = {
        "title": escape(f"{analysis.name}: what the search found"),
        "style": _asset("page.css"),
        "header": sections.header_section(analysis),
        "answer": sections.answer_section(analysis),
        "notes": sections.notes_section(analysis),
        "plotly": f"<script>{get_plotlyjs()}</script>",
        "progress": _progress(analysis, figures),
        "trade_offs": _trade_offs(analysis, pareto, figures),
        "space": _space(analysis, figures),
        "schedule": figures.card(plots.timeline(analysis)),
        "table": sections.trials_table(analysis),
        "failures": sections.failures_section(analysis),
        "facts": sections.summary_section(analysis),
        "sort": f"<script>{_asset('sort.js')}</script>",
    }
    scripts = [text for name in ("plotly", "sort") for text in _SCRIPT.findall(parts[name])]
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in [*scripts, *figures.scripts])
    allowed = f"style-src 'unsafe-inline'; img-src data: blob:; script-src {hashes}"
    parts["policy"] = f"default-src 'none'; {allowed}"
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


class _Figures:
    """Turns figures into cards of the page and keeps their scripts, which the policy names."""

    def __init__(self) -> None:
        self.scripts: list[str] = []

    def card(self, figure: Figure, *, min_width: int = 0) -> str:
        """Return a figure with its title and subtitle as text of the page, where they break on a phone."""
        title, said = figure.layout.title.text or "", figure.layout.title.subtitle.text or ""
        height = figure.layout.height
        legend = any(trace.showlegend is not False and trace.name for trace in figure.data)
        top = 44 if legend and figure.layout.showlegend is not False and len(figure.data) > 1 else 16
        figure.update_layout(
            title=None,
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            margin={"l": 4, "r": 8, "t": top, "b": 4},
            height=height - 104 + top,
        )
        drawn = figure.to_html(
            full_html=False,
            include_plotlyjs=False,
            config=_CONFIG,
            div_id=f"figure-{len(self.scripts)}",
            default_height=f"{figure.layout.height}px",
        )
        self.scripts += _SCRIPT.findall(drawn)
        wide = f' style="min-width:{min_width}px"' if min_width else ""
        # Both are escaped already, as Plotly wants them.
        note = f'<p class="said">{said}</p>' if said else ""
        inner = f'<div class="scroll"><div{wide}>{drawn}</div></div>'
        return f'<div class="card"><h3>{title}</h3>{inner}{note}</div>'


def _progress(analysis: Analysis, figures: _Figures) -> str:
    if not analysis.has_best:
        return f'<p class="none">There is nothing to draw: {escape(analysis.no_best_reason)}</p>'
    drawn = {
        "Best so far": plots.best_so_far(analysis),
        "Learning curves over iterations": plots.learning_curves(analysis),
        "Best so far over trials": plots.best_so_far(analysis, "trials"),
        "Learning curves over time": plots.learning_curves(analysis, "time"),
    }
    cards = [figures.card(figure.update_layout(title_text=title)) for title, figure in drawn.items()]
    return f'<div class="two">{"".join(cards)}</div>'


def _trade_offs(analysis: Analysis, pareto: Mapping[str, str] | None, figures: _Figures) -> str:
    if pareto is None and set(analysis.record.front) <= set(analysis.reported_numbers):
        pareto = analysis.record.front
    if not pareto:
        return ""
    front = analysis.pareto_front(pareto)
    drawn = len(front.metrics) == 2 and front.on_front.any()
    picture = figures.card(plots.pareto_front(analysis, pareto)) if drawn else ""
    head = '<section id="trade-offs"><h2>Several metrics at once</h2>'
    return f'{head}{picture}<div class="card">{sections.trade_offs(front)}</div></section>'


def _space(analysis: Analysis, figures: _Figures) -> str:
    found = varying_parameters(analysis)
    if not analysis.has_best or not found:
        why = "no hyperparameter varies" if analysis.has_best else "that needs a metric"
        return f'<p class="none">There is nothing to draw: {why}.</p>'
    cards = [figures.card(plots.parallel_coordinates(analysis), min_width=(len(found) + 1) * 92)]
    cards.append(figures.card(plots.importance(analysis)))
    small = "".join(figures.card(plots.parameter(analysis, one.name)) for one in found[:_PARAMETERS])
    cards.append(f'<div class="multiples">{small}</div>')
    left = len(found) - _PARAMETERS
    cards += [f'<p class="said">{left} more hyperparameters are in the table.</p>'] if left > 0 else []
    return "".join(cards)
