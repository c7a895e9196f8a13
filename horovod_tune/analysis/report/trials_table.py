"""The page's table of trials: every trial is in it, best first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

from horovod_tune.analysis.expectations import expectations, standings
from horovod_tune.analysis.reader.tune_fields import iteration_of
from horovod_tune.analysis.report.run_facts import duration
from horovod_tune.analysis.results import Analysis
from horovod_tune.analysis.trial_facts import error_line, ranks_of, spans
from horovod_tune.analysis.varying_parameters import text_of, varying_parameters


@dataclass(frozen=True)
class _Column:
    """One column: `value` of a trial's number; numbers sort as such, and `shown` writes one out."""

    name: str
    value: Callable[[int], Any]
    number: bool = False
    shown: Callable[[Any], str] = text_of


def trials_table(analysis: Analysis) -> str:
    """Return the table as HTML. `sort.js` sorts it; without scripts it stays as it is, best first."""
    columns = [column for column in _columns(analysis) if column is not None]
    best = analysis.best_number
    heads = "".join(
        f"<th scope=col{' class=n' if column.number else ''} aria-sort=none>"
        f"<button type=button>{escape(column.name)}</button>"
        for column in columns
    )
    rows = "\n".join(
        f"<tr{' class=best-row' if trial == best else ''}>{''.join(_cell(c, trial) for c in columns)}"
        for trial in analysis.ranked
    )
    return f"<table id=table><thead><tr>{heads}</thead><tbody>{rows}</tbody></table>"


def _cell(column: _Column, trial: int) -> str:
    value = column.value(trial)
    if value is None or value != value:
        return "<td>"
    shown = column.shown(value)
    exact = f"{value:.9g}" if isinstance(value, float) and column.number else shown
    # Without the closing tags, which HTML leaves to the writer: 5,000 trials have 60,000 cells.
    sorts_by = f' data-v="{escape(exact)}"' if exact != shown else ""
    return f"<td{' class=n' if column.number else ''}{sorts_by}>{escape(shown)}"


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def _columns(analysis: Analysis) -> list[_Column | None]:
    trials, metric = analysis.trials, analysis.metric or ""
    found: list[_Column | None] = [
        _Column("trial", lambda trial: trials[trial].trial_id),
        _Column("status", lambda trial: trials[trial].status.lower()),
    ]
    if analysis.is_scored:
        scores = analysis.scores
        found += [
            _Column(metric, lambda trial: scores[trial].last, True, _short),
            _Column(f"best {metric}", lambda trial: scores[trial].best, True, _short),
            _Column("at iteration", lambda trial: scores[trial].best_iteration, True),
        ]
        expected, stands = expectations(analysis), standings(analysis)
        if expected:
            ends = {trial: float(one.middle[-1]) for trial, one in expected.items()}
            found.append(_Column(f"expected {metric}", ends.get, True, _short))
        if stands:
            found.append(_Column("rung", lambda trial: stands[trial].text if trial in stands else None))
    found += [
        _Column("iterations", lambda trial: _iterations(analysis, trial), True),
        _Column("time", lambda trial: _seconds(analysis, trial), True, duration),
        _column_of_ranks(analysis),
    ]
    for one in varying_parameters(analysis):
        numeric = one.kind == "numeric" or all(isinstance(v, (int, float, type(None))) for v in one.values)
        shown = _short if numeric else lambda value: text_of(value)[:80]
        found.append(_Column(one.name, lambda trial, one=one: one.values[trial], numeric, shown))  # type: ignore[misc]
    if any(trial.error is not None for trial in trials):
        found.append(_Column("error", lambda trial: (error_line(trials[trial].error) or "")[:300]))
    return found


def _iterations(analysis: Analysis, trial: int) -> int:
    return max((iteration_of(row) or 0 for row in analysis.reports(analysis.trials[trial])), default=0)


def _seconds(analysis: Analysis, trial: int) -> float | None:
    held = spans(analysis.trials[trial], analysis.record.sessions)
    return sum(end - trained for _, trained, end in held) if held else None


def _column_of_ranks(analysis: Analysis) -> _Column | None:
    ranks = [ranks_of(trial) for trial in analysis.trials]
    return _Column("ranks", ranks.__getitem__, True) if any(ranks) else None
