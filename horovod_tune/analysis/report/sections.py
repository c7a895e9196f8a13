"""The parts of the page that are text: header, the best, failures, the facts of the run, the table of trials.

Everything that came from the user is escaped here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from html import escape
from importlib import metadata
from typing import Any

from horovod_tune.analysis.pareto import ParetoFront
from horovod_tune.analysis.printable import python_text, yaml_text
from horovod_tune.analysis.report.run_summary import (
    duration,
    hours,
    moment,
    run_summary,
    statuses,
    usage,
    wall_text,
)
from horovod_tune.analysis.results import Analysis
from horovod_tune.analysis.trial_details import error_line, iterations_of, ranks_of, spans
from horovod_tune.analysis.varying_parameters import text_of, varying_parameters

_GROUPS, _TRACEBACK, _PROBLEMS, _FRONT = 100, 20_000, 200, 100


def header_section(analysis: Analysis) -> str:
    (cpu, gpu, counted), wall = usage(analysis), wall_text(analysis)
    tiles = [("trials", f"{len(analysis.trials):,}", statuses(analysis))]
    if wall is not None:
        tiles.append(("wall time", wall, moment(analysis.record.start_time or 0.0)))
    if counted:
        tiles.append(("CPU time", hours(cpu), f"{hours(gpu)} of GPU" if gpu else "no GPU"))
    cells = "".join(
        f'<div class="tile"><div class="tile-name">{escape(name)}</div>'
        f'<div class="tile-value">{escape(value)}</div>'
        f'<div class="tile-more">{escape(more)}</div></div>'
        for name, value, more in tiles
    )
    state = f'<span class="state state-{analysis.state}">{analysis.state}</span>'
    return f'<h1>{escape(analysis.name)} {state}</h1><div class="tiles">{cells}</div>'


def answer_section(analysis: Analysis) -> str:
    if not analysis.has_best:
        return f'<p class="none">No best trial: {escape(analysis.no_best_reason)}</p>'
    trial, scored = analysis.best_trial, analysis.scores[analysis.best_number or 0]
    word = "lowest" if analysis.mode == "min" else "highest"
    against = "by its last value" if analysis.scope == "last" else "by its best value"
    best = f"; its best was {scored.best:.6g} at iteration {scored.best_iteration}"
    checkpoint = analysis.best_checkpoint_path
    places = {"Trial": trial.trial_id, "Checkpoint": checkpoint, "Folder": trial.directory}
    listed = "".join(
        f"<dt>{name}</dt><dd>{f'<code>{escape(place)}</code>' if place else 'this trial kept none'}</dd>"
        for name, place in places.items()
    )
    return (
        '<div class="best"><div class="best-value">'
        f'<div class="tile-name">{word} {escape(analysis.metric or "")}</div>'
        f'<div class="huge">{analysis.best_value:.6g}</div>'
        f'<div class="tile-more">{against} of {len(analysis.trials):,} trials'
        f"{best if analysis.scope == 'last' else ''}</div>"
        f"<dl>{listed}</dl></div>"
        f'<div class="configs">{_code("Python", python_text(analysis.best_config))}'
        f"{_code('YAML', yaml_text(analysis.best_config))}</div></div>"
    )


def _code(name: str, text: str) -> str:
    code = f"<pre><code>{escape(text)}</code></pre>"
    return f'<figure class="code"><figcaption>{name}</figcaption>{code}</figure>'


def notes_section(analysis: Analysis) -> str:
    if not analysis.problems:
        return ""
    count = len(analysis.problems)
    shown = analysis.problems[:_PROBLEMS]
    lines = "".join(f"<li><strong>{escape(p.where)}</strong>: {escape(p.what)}</li>" for p in shown)
    more = f"<li>and {count - _PROBLEMS} more</li>" if count > _PROBLEMS else ""
    summary = f"{count} {'part' if count == 1 else 'parts'} of the experiment could not be read whole"
    return f'<details class="notes"><summary>{summary}</summary><ul>{lines}{more}</ul></details>'


def trade_offs(front: ParetoFront) -> str:
    """Return what is known of a front: a summary and its table."""
    if not front.on_front.any():
        return '<p class="none">No result has a finite value of each of these metrics.</p>'
    return f'<p class="said">{escape(_summary(front))}</p>{_table(front)}'


def _summary(front: ParetoFront) -> str:
    words = {"min": "lower", "max": "higher"}
    aims = ", ".join(f"{name} ({words[mode]})" for name, mode in front.metrics.items())
    corner = ", ".join(f"{name} {value:.6g}" for name, value in front.reference.items())
    return (
        f"Better is: {aims}. {int(front.on_front.sum())} of {len(front.points):,} results are beaten by no "
        f"other one in all of them; they dominate a hypervolume of {front.hypervolume():.6g} up to the "
        f"worst of each ({corner})."
    )


def _table(front: ParetoFront) -> str:
    table = front.dataframe()
    names = [str(name).removeprefix("config/") for name in table.columns]
    heads = "".join(f"<th scope=col>{escape(name)}</th>" for name in names)
    listed = table.head(_FRONT).itertuples(index=False)
    cells = ("".join(f"<td>{escape(text_of(value))}</td>" for value in row) for row in listed)
    rows = "".join(f"<tr>{row}</tr>" for row in cells)
    left = len(table) - _FRONT
    more = f'<p class="said">and {left} more</p>' if left > 0 else ""
    inner = f"<thead><tr>{heads}</tr></thead><tbody>{rows}</tbody>"
    return f'<div class="scroll"><table class="facts">{inner}</table></div>{more}'


def failures_section(analysis: Analysis) -> str:
    errors = analysis.errors()
    if not errors:
        return '<p class="none">No trial failed.</p>'
    groups: dict[str, list[str]] = {}
    for trial_id, text in errors.items():
        groups.setdefault(error_line(text) or "", []).append(trial_id)
    ordered = sorted(groups.items(), key=lambda group: -len(group[1]))
    html = "".join(_failure(line, ids, errors[ids[0]]) for line, ids in ordered[:_GROUPS])
    left = len(ordered) - _GROUPS
    more = f'<p class="said">{left} more kinds of failure are in the error files.</p>' if left > 0 else ""
    return html + more


def _failure(line: str, ids: list[str], text: str) -> str:
    shown = ", ".join(ids[:12]) + (f" and {len(ids) - 12} more" if len(ids) > 12 else "")
    if len(text) > _TRACEBACK:
        text = text[:_TRACEBACK] + "\n… (the rest is in the trial's error.txt)"
    count = f"{len(ids)} trials" if len(ids) > 1 else "1 trial"
    first = f"<p>The first, {escape(ids[0])}:</p>" if len(ids) > 1 else ""
    return (
        '<details class="failure">'
        f'<summary><span class="count">{count}</span> {escape(line[:400])}</summary>'
        f'<p class="said">{escape(shown)}</p>{first}<pre>{escape(text)}</pre></details>'
    )


def summary_section(analysis: Analysis) -> str:
    made = f"Made by horovod_tune {metadata.version('horovod_tune')} on {moment(time.time())}."
    return f'{_facts(run_summary(analysis))}{_space(analysis)}<p class="said">{made}</p>'


def _facts(rows: Iterable[tuple[str, str]], tag: str = "span") -> str:
    """Return a table of names and texts, each within `tag`."""
    cells = "".join(
        f"<tr><th scope=row><{tag}>{escape(name)}</{tag}></th><td><{tag}>{escape(text)}</{tag}></td></tr>"
        for name, text in rows
    )
    return f'<table class="facts"><tbody>{cells}</tbody></table>'


def _space(analysis: Analysis) -> str:
    domains, constants = analysis.record.domains, analysis.record.constants
    if not domains:
        return '<p class="said">The search space is not written down in this experiment.</p>'
    rows = [(name, domain.text) for name, domain in domains.items()]
    rows += [(name, f"{value!r} (constant)"[:300]) for name, value in constants.items()]
    return f"<h3>Search space</h3>{_facts(rows, 'code')}"


# A column's name, a value for each trial, and how to write one that sorts as a number; None for text.
_Column = tuple[str, Sequence[Any], Callable[[Any], str] | None]


def trials_table(analysis: Analysis) -> str:
    """Return the table as HTML. `sort.js` sorts it; without scripts it stays as it is, best first."""
    columns, best = _columns(analysis), analysis.best_number
    heads = "".join(
        f"<th scope=col{' class=n' if shown else ''} aria-sort=none>"
        f"<button type=button>{escape(name)}</button>"
        for name, _, shown in columns
    )
    rows = "\n".join(
        f"<tr{' class=best-row' if trial == best else ''}>"
        f"{''.join(_cell(values[trial], shown) for _, values, shown in columns)}"
        for trial in analysis.ranked
    )
    return f"<table id=table><thead><tr>{heads}</thead><tbody>{rows}</tbody></table>"


def _cell(value: Any, shown: Callable[[Any], str] | None) -> str:
    if value is None or value != value:
        return "<td>"
    # Without the closing tags, which HTML leaves to the writer: 5,000 trials have 60,000 cells.
    if shown is None:
        return f"<td>{escape(text_of(value)[:300])}"
    text, exact = shown(value), f"{value:.9g}" if isinstance(value, float) else str(value)
    sorts_by = f' data-v="{escape(exact)}"' if exact != text else ""
    return f"<td class=n{sorts_by}>{escape(text)}"


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _columns(analysis: Analysis) -> list[_Column]:
    trials, metric = analysis.trials, analysis.metric or ""
    found: list[_Column] = [
        ("trial", [trial.trial_id for trial in trials], None),
        ("status", [trial.status.lower() for trial in trials], None),
    ]
    if analysis.is_scored:
        found += [
            (metric, [score.last for score in analysis.scores], _short),
            (f"best {metric}", [score.best for score in analysis.scores], _short),
            ("at iteration", [score.best_iteration for score in analysis.scores], str),
        ]
    held = [spans(trial, analysis.record.sessions) for trial in trials]
    times = [sum(end - trained for _, trained, end in one) if one else None for one in held]
    found += [("iterations", list(map(iterations_of, trials)), str), ("time", times, duration)]
    ranks = [ranks_of(trial) for trial in trials]
    if any(ranks):
        found.append(("ranks", ranks, str))
    for one in varying_parameters(analysis):
        numeric = one.kind == "numeric" or all(isinstance(v, (int, float, type(None))) for v in one.values)
        found.append((one.name, one.values, _short if numeric else None))
    if any(trial.error is not None for trial in trials):
        found.append(("error", [error_line(trial.error) for trial in trials], None))
    return found
