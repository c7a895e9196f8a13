"""Puts the page together: everything that came from the user is escaped here, or is JSON that cannot end."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import pprint
import re
import time
from collections.abc import Mapping
from html import escape
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from horovod_tune.analysis.importance import METHOD, TooFewTrials, importances
from horovod_tune.analysis.report.payload import as_script_json, payload
from horovod_tune.analysis.report.run_facts import (
    duration,
    facts,
    hours,
    moment,
    statuses,
    usage,
    wall_time_s,
)
from horovod_tune.analysis.report.trade_offs import trade_offs
from horovod_tune.analysis.results import Analysis
from horovod_tune.analysis.trial_facts import error_line

_SCRIPTS = ("core.js", "curves.js", "space.js", "schedule.js", "table.js")
_GROUPS, _TRACEBACK = 100, 20_000


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
    it has where `BayesOptSearch` looked for several metrics.

    Its content security policy allows no network, and no script but its own (by hash).
    """
    script = "\n".join(_asset(name) for name in _SCRIPTS)
    script = f"(() => {{\n'use strict';\n{script}\n}})();"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
    parts = {
        "title": escape(f"{analysis.name}: what the search found"),
        "policy": f"default-src 'none'; {allowed}",
        "style": _asset("page.css"),
        "header": _header(analysis),
        "answer": _answer(analysis),
        "notes": _notes(analysis),
        "trade_offs": _trade_offs(analysis, pareto),
        "importance": _importance(analysis),
        "failures": _failures(analysis),
        "facts": _facts(analysis),
        "data": as_script_json(payload(analysis)),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _header(analysis: Analysis) -> str:
    counts = statuses(analysis)
    used, wall = usage(analysis), wall_time_s(analysis)
    tiles = [
        ("trials", f"{len(analysis.trials):,}", ", ".join(f"{n:,} {s.lower()}" for s, n in counts.items()))
    ]
    if wall is not None:
        tiles.append(("wall time", duration(wall), moment(analysis.record.start_time or 0.0)))
    if used.cpu is not None and used.gpu is not None:
        gpu = f"{hours(used.gpu)} of GPU" if used.gpu else "no GPU"
        tiles.append(("CPU time", hours(used.cpu), gpu))
    cells = "".join(
        f'<div class="tile"><div class="tile-name">{escape(name)}</div>'
        f'<div class="tile-value">{escape(value)}</div>'
        f'<div class="tile-more">{escape(more)}</div></div>'
        for name, value, more in tiles
    )
    state = escape(analysis.state)
    return (
        f'<h1>{escape(analysis.name)} <span class="state state-{state}">{state}</span></h1>'
        f'<div class="tiles">{cells}</div>'
    )


def _answer(analysis: Analysis) -> str:
    if not analysis.has_best:
        return f'<p class="none">No best trial: {escape(analysis.why_no_best)}</p>'
    trial, scored = analysis.best_trial, analysis.scores[analysis.trials.index(analysis.best_trial)]
    word = "lowest" if analysis.mode == "min" else "highest"
    against = "by its last value" if analysis.scope == "last" else "by its best value"
    best = (
        f"; its best was {scored.best:.6g} at iteration {scored.best_iteration}"
        if analysis.scope == "last"
        else ""
    )
    rows = [
        ("Trial", trial.trial_id),
        ("Checkpoint", analysis.best_checkpoint_path),
        ("Folder", trial.directory),
    ]
    listed = "".join(f"<dt>{name}</dt><dd>{_place(value)}</dd>" for name, value in rows)
    return (
        '<div class="best"><div class="best-value">'
        f'<div class="tile-name">{word} {escape(analysis.metric or "")}</div>'
        f'<div class="huge">{analysis.best_value:.6g}</div>'
        f'<div class="tile-more">{against} of {len(analysis.trials):,} trials{best}</div>'
        f"<dl>{listed}</dl></div>"
        f'<div class="configs">{_code("Python", python_text(analysis.best_config))}'
        f"{_code('YAML', yaml_text(analysis.best_config))}</div></div>"
    )


def _place(text: str | None) -> str:
    if not text:
        return "this trial kept none"
    return f"<code>{escape(text)}</code>{_copy_button(text) if '/' in text else ''}"


def _copy_button(text: str) -> str:
    return f'<button type="button" class="copy" data-copy="{escape(text, quote=True)}">Copy</button>'


def _code(name: str, text: str) -> str:
    return (
        f'<figure class="code"><figcaption>{name}{_copy_button(text)}</figcaption>'
        f"<pre><code>{escape(text)}</code></pre></figure>"
    )


def python_text(config: dict[str, Any]) -> str:
    """A configuration as a Python statement that can be run.

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
    """A configuration as YAML."""
    import yaml

    return str(yaml.safe_dump(config, sort_keys=False, default_flow_style=False, allow_unicode=True)).rstrip()


def _notes(analysis: Analysis) -> str:
    if not analysis.problems:
        return ""
    count = len(analysis.problems)
    lines = "".join(
        f"<li><strong>{escape(p.where)}</strong>: {escape(p.what)}</li>" for p in analysis.problems[:200]
    )
    more = f"<li>and {count - 200} more</li>" if count > 200 else ""
    noun = "part" if count == 1 else "parts"
    return (
        f'<details class="notes"><summary>{count} {noun} of the experiment could not be read whole</summary>'
        f"<ul>{lines}{more}</ul></details>"
    )


def _trade_offs(analysis: Analysis, pareto: Mapping[str, str] | None) -> str:
    if pareto is None and set(analysis.record.front) <= set(analysis.reported_numbers):
        pareto = analysis.record.front
    if not pareto:
        return ""
    section = trade_offs(analysis.pareto_front(pareto))
    head = '<section id="trade-offs"><h2>Several metrics at once</h2>'
    return f'{head}<div class="card">{section}</div></section>'


def _importance(analysis: Analysis) -> str:
    if not analysis.has_best:
        return '<p class="none">Importances need a metric.</p>'
    try:
        found = importances(analysis)
    except TooFewTrials as error:
        return f'<p class="none">{escape(str(error)[:1].upper() + str(error)[1:])}.</p>'
    top = max(max(found.drop), 1e-9)
    bars = "".join(
        f'<div class="bar-name">{escape(name)}</div>'
        f'<div class="bar"><div style="width:{max(0.0, drop) / top * 100:.1f}%"></div></div>'
        f'<div class="bar-value">{max(drop, 0.0):.2f} ± {spread:.2f}</div>'
        for name, drop, spread in zip(found.names[:20], found.drop, found.spread, strict=False)
    )
    if found.r2 < 0.2:
        trust = "That is too low to trust these bars: the hyperparameters hardly explain the metric so far."
    else:
        trust = "1 would be a perfect prediction from the hyperparameters alone."
    return (
        f'<div class="bars">{bars}</div>'
        f'<p class="said">Drop of R² when a hyperparameter is shuffled: {METHOD}, '
        f"on {found.trials:,} trials. The model's own R² is {found.r2:.2f}. {trust}</p>"
    )


def _failures(analysis: Analysis) -> str:
    errors = analysis.errors()
    if not errors:
        return '<p class="none">No trial failed.</p>'
    groups: dict[str, list[str]] = {}
    for trial_id, text in errors.items():
        groups.setdefault(error_line(text) or "", []).append(trial_id)
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    said = "".join(_failure(line, ids, errors[ids[0]]) for line, ids in ordered[:_GROUPS])
    left = len(ordered) - _GROUPS
    return said + (
        f'<p class="said">{left} more kinds of failure are in the error files.</p>' if left > 0 else ""
    )


def _failure(line: str, ids: list[str], text: str) -> str:
    shown = ", ".join(ids[:12]) + (f" and {len(ids) - 12} more" if len(ids) > 12 else "")
    cut = (
        text if len(text) <= _TRACEBACK else text[:_TRACEBACK] + "\n… (the rest is in the trial's error.txt)"
    )
    count = f"{len(ids)} trials" if len(ids) > 1 else "1 trial"
    first = f"<p>The first, {escape(ids[0])}:</p>" if len(ids) > 1 else ""
    return (
        '<details class="failure">'
        f'<summary><span class="count">{count}</span> {escape(line[:400])}</summary>'
        f'<p class="said">{escape(shown)}</p>{first}<pre>{escape(cut)}</pre></details>'
    )


def _facts(analysis: Analysis) -> str:
    rows = "".join(
        f"<tr><th scope=row>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in facts(analysis)
    )
    return (
        f'<table class="facts"><tbody>{rows}</tbody></table>{_space(analysis)}<p class="said">{_made()}</p>'
    )


def _space(analysis: Analysis) -> str:
    domains, constants = analysis.record.domains, analysis.record.constants
    if domains is None:
        return '<p class="said">The search space is not written down in this experiment.</p>'
    rows = [(name, domain.text) for name, domain in domains.items()]
    rows += [(name, f"{value!r} (constant)"[:300]) for name, value in constants.items()]
    cells = "".join(
        f"<tr><th scope=row><code>{escape(name)}</code></th><td><code>{escape(text)}</code></td></tr>"
        for name, text in rows
    )
    return f'<h3>Search space</h3><table class="facts"><tbody>{cells}</tbody></table>'


def _made() -> str:
    try:
        version = metadata.version("horovod_tune")
    except metadata.PackageNotFoundError:
        version = ""
    return f"Made by horovod_tune {escape(version)} on {moment(time.time())}."
