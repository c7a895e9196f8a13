"""An experiment as a notebook shows it: a piece of HTML without scripts."""

from __future__ import annotations

from html import escape

from horovod_tune.analysis.printable import one_line, python_text, sparkline
from horovod_tune.analysis.report.run_facts import (
    comparison_text,
    duration,
    run_text,
    state_text,
    trials_text,
    wall_time_s,
)
from horovod_tune.analysis.results import Analysis
from horovod_tune.analysis.series import curves
from horovod_tune.analysis.trial_facts import error_line
from horovod_tune.analysis.varying_parameters import text_of, varying_parameters

_ROWS, _PARAMETERS, _FAILURES = 10, 6, 5


def html_summary(analysis: Analysis) -> str:
    """Return the best, a table of the best trials with their curves, and what failed or was not read."""
    wall = wall_time_s(analysis)
    took = f" · {duration(wall)}" if wall is not None else ""
    parts = [
        f"<div><strong>{_text(analysis.name)}</strong>{_text(run_text(analysis))} "
        f"{_text(state_text(analysis))} · {_text(trials_text(analysis))}{took}</div>",
        _best(analysis),
        _table(analysis),
    ]
    errors = list(analysis.errors().items())
    parts += [f"<div>{_text(trial)} failed: {_text(error_line(e))}</div>" for trial, e in errors[:_FAILURES]]
    parts += [_more(len(errors) - _FAILURES, "failed")]
    parts += [f"<div>not read whole: {_text(problem)}</div>" for problem in analysis.problems[:_FAILURES]]
    parts += [_more(len(analysis.problems) - _FAILURES, "could not be read whole")]
    return f"<div>{''.join(parts)}</div>"


def _text(value: object) -> str:
    return escape(one_line(str(value)))


def _more(count: int, what: str) -> str:
    return f"<div>and {count} more {what}</div>" if count > 0 else ""


def _best(analysis: Analysis) -> str:
    if not analysis.has_best:
        return f"<div>No best trial: {_text(analysis.why_no_best)}</div>"
    return (
        f"<div>best {_text(analysis.metric)} <strong>{analysis.best_value:.6g}</strong> in trial "
        f"{_text(analysis.best_trial.trial_id)} ({_text(comparison_text(analysis))})</div>"
        f"<pre>{escape(python_text(analysis.best_config)[:5000])}</pre>"
    )


def _table(analysis: Analysis) -> str:
    if not analysis.has_best:
        return ""
    shown = varying_parameters(analysis)[:_PARAMETERS]
    drawn = curves(analysis)
    order = analysis.ranked
    heads = ["trial", "status", analysis.metric or "", "best", "curve", *(one.name for one in shown)]
    rows = []
    for index in order[:_ROWS]:
        trial, score = analysis.trials[index], analysis.scores[index]
        numbers = [f"{score.last:.5g}", f"{score.best:.5g}", sparkline(list(drawn[index].values), 16)]
        settings = ["" if one.values[index] is None else text_of(one.values[index])[:40] for one in shown]
        cells = [trial.trial_id, trial.status.lower(), *numbers, *settings]
        rows.append(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>")
    head = "".join(f"<th>{_text(name)}</th>" for name in heads)
    return (
        f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        f"{_more(len(order) - _ROWS, 'trials')}"
    )
