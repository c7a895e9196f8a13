"""`horovod-tune show`: prints an experiment in the terminal with rich, once or while it runs."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from horovod_tune.analysis.open_experiment import several_runs
from horovod_tune.analysis.printable import one_line, printable, python_text, sparkline
from horovod_tune.analysis.report.run_summary import (
    comparison_text,
    run_summary,
    state_text,
    trials_text,
    wall_text,
)
from horovod_tune.analysis.results import Analysis
from horovod_tune.analysis.trial_details import error_line, iterations_of, rank_changes
from horovod_tune.analysis.varying_parameters import text_of, varying_parameters

_STYLES = {"TERMINATED": "", "RUNNING": "cyan", "PENDING": "dim", "PAUSED": "dim", "ERROR": "bold red"}
_CONFIG_LINES, _LINES = 60, 5  # at most: of the best configuration; of failures, and again of problems
# In characters. Names are cut to no less than the first, texts of hyperparameters always to the second.
_NAME, _TEXT, _GAP = 12, 24, 3


def view(
    analysis: Analysis, *, rows: int = 20, width: int = 100, with_summary: bool = True, is_live: bool = False
) -> Group:
    """Return the experiment for rich to print: the best trial, a table of trials, failures, a summary.

    The table has only the columns that fit into `width` characters. Ids and numbers are never cut.
    """
    known = (state_text(analysis), trials_text(analysis), wall_text(analysis))
    head = Text.assemble(_safe(analysis.name, "bold"), _safe("  " + " · ".join(filter(None, known))))
    parts: list[RenderableType] = [head, Text()]
    if len(analysis.runs) > 1:
        parts += [_safe(several_runs(analysis.record), "yellow"), Text()]
    parts += [*_best(analysis, is_live), _table(analysis, rows, width), Text()]
    errors = analysis.errors()
    if errors:
        parts.append(Text(f"{len(errors)} failed", style="bold red"))
        parts += [_safe(f"  {trial}: {error_line(text)}") for trial, text in list(errors.items())[:_LINES]]
        parts += [Text(f"  and {len(errors) - _LINES} more")] if len(errors) > _LINES else []
        parts.append(Text())
    changed = {trial.trial_id: rank_changes(trial) for trial in analysis.trials}
    lines = [f"  {name}, at iteration {at}: {why}" for name, each in changed.items() for at, why in each]
    if lines:
        parts += [Text("Changes of ranks", style="bold"), *map(_safe, lines[:_LINES])]
        parts += [Text(f"  and {len(lines) - _LINES} more")] if len(lines) > _LINES else []
        parts.append(Text())
    parts += [_safe(f"not read completely: {problem}", "yellow") for problem in analysis.problems[:_LINES]]
    if (more := len(analysis.problems) - _LINES) > 0:
        parts.append(Text(f"and {more} more could not be read completely", style="yellow"))
    if with_summary:
        parts += [_safe(f"{name:<21} {text}", "dim") for name, text in run_summary(analysis)[4:]]
    return Group(*parts)


def as_html(shown: RenderableType) -> str:
    """Convert what rich can print to HTML without scripts, for a notebook."""
    screen = Console(record=True, file=io.StringIO(), width=160, force_jupyter=False)
    screen.print(shown)
    look = '<pre style="line-height: 1.2; overflow-x: auto">{code}</pre>'
    return screen.export_html(inline_styles=True, code_format=look)


def _safe(text: str, style: str = "") -> Text:
    """Return text from the experiment's files, in which nothing steers the terminal."""
    return Text(one_line(text), style=style)


def _best(analysis: Analysis, is_live: bool) -> list[RenderableType]:
    if not analysis.has_best:
        return [_safe(f"No best trial: {analysis.no_best_reason}", "yellow"), Text()]
    line = Text.assemble(
        _safe(f"best {analysis.metric} {analysis.value_text(analysis.best_value)}", "bold green"),
        _safe(f"  {analysis.best_trial.trial_id}  ({comparison_text(analysis)})"),
    )
    written = printable(python_text(analysis.best_config)).split("\n")
    if len(written) > _CONFIG_LINES:
        written[_CONFIG_LINES:] = [f"… and {len(written) - _CONFIG_LINES} more lines: see best_config"]
    checkpoint = analysis.best_checkpoint_path or "none kept"
    # To be copied, and so not broken into lines; a live view would cut long ones.
    whole: dict[str, Any] = {} if is_live else {"no_wrap": True, "overflow": "ignore"}
    copied = ("\n".join(written), one_line(f"checkpoint: {checkpoint}"))
    return [line, *(Text(text, **whole) for text in copied), Text()]


@dataclass(frozen=True, eq=False)
class _Column:
    name: str
    cells: list[Text]
    on_the_right: bool = False

    def title(self, longest: int) -> str:
        """Return the name, or its end: nested names often begin alike."""
        name = one_line(self.name)
        if cell_len(name) <= longest:
            return name
        while cell_len(name) >= longest:
            name = name[1:]
        return f"…{name}"

    def width(self, longest: int) -> int:
        return max(cell_len(self.title(longest)), *(cell.cell_len for cell in self.cells), 0)


def _table(analysis: Analysis, rows: int, width: int) -> Table:
    order = analysis.ranked[:rows]
    trials = [analysis.trials[number] for number in order]
    status = _Column("status", [_safe(t.shown_status, _STYLES.get(t.status, "")) for t in trials])
    iterations = _Column("it", [Text(str(iterations_of(trial) or "")) for trial in trials], True)
    columns = [_Column("trial", [_safe(trial.trial_id) for trial in trials]), status]
    spare = [status, iterations]  # left out in this order if the screen is too narrow
    if analysis.is_scored:  # also if no trial meets the limits
        reports = analysis.reports[analysis.reports["known"]]
        curves = [reports.loc[reports["trial"] == number, "value"].to_numpy() for number in order]
        scores = analysis.scores.loc[order]
        shown = {
            name: [
                _number(analysis.value_text(value, digits=5)) if trial.reports else Text()
                for value, trial in zip(scores[name], trials, strict=True)
            ]
            for name in ("last", "best")
        }
        last, best = _Column(analysis.metric or "", shown["last"], True), _Column("best", shown["best"], True)
        curve = _Column("curve", [Text(sparkline(curve, 16), style="cyan") for curve in curves])
        columns, spare = [*columns, last, best, curve], [curve, *spare, best]
    for name, numbers in analysis.unranked().items():
        columns.append(_Column(name, [Text(_short(numbers[number])) for number in order], True))
        spare.insert(0, columns[-1])
    columns.append(iterations)
    found = varying_parameters(analysis)
    columns += [_Column(one.name, [_safe(_short(one.values[number])) for number in order]) for one in found]

    def fits(longest: int) -> bool:
        return sum(each.width(longest) + _GAP for each in columns) - _GAP <= width

    fixed, left = len(columns) - len(found), {"trials": len(analysis.trials) - rows, "hyperparameters": 0}
    while len(columns) > fixed and not fits(_NAME):
        columns.pop()
        left["hyperparameters"] += 1
    for column in spare:
        if not fits(_NAME):
            columns.remove(column)
    longest = next((n for n in range(width, _NAME, -1) if fits(n)), _NAME)

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, caption_justify="left")
    for each in columns:
        justify: JustifyMethod = "right" if each.on_the_right else "left"
        table.add_column(Text(each.title(longest)), justify=justify, no_wrap=True, width=each.width(longest))
    if not fits(longest):  # the ids or numbers alone are wider
        table.width = sum(each.width(longest) + _GAP for each in columns) - _GAP
    for number, *cells in zip(order, *(each.cells for each in columns), strict=True):
        table.add_row(*cells, style="bold" if number == analysis.best_number else "")
    more = ", ".join(f"{count} more {what}" for what, count in left.items() if count > 0)
    table.caption = _safe(f"not shown: {more}") if more else None
    return table


def _number(text: str) -> Text:
    return Text("nan", style="dim") if text in ("nan", "inf", "-inf") else Text(text)


def _short(value: Any) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else text_of(value)
    cut = not isinstance(value, (int, float)) and len(text) > _TEXT
    return f"{text[: _TEXT - 1]}…" if cut else text


def watch(
    analysis: Analysis,
    screen: Console,
    *,
    interval_s: float = 5.0,
    rows: int = 20,
    sleep: Callable[[float], None] = time.sleep,
) -> Analysis:
    """Refresh the view of a running experiment every `interval_s` seconds until it has ended.

    Ctrl-C ends it earlier. The last view stays on the screen; if the console is not a terminal, no other view
    is printed. Returns the experiment as it was last read.
    """

    def fitting(seen: Analysis) -> Group:
        fit = max(3, min(rows, screen.height - 18))
        return view(seen, rows=fit, width=screen.width, with_summary=False, is_live=True)

    with suppress(KeyboardInterrupt), Live(fitting(analysis), console=screen, auto_refresh=False) as live:
        while analysis.state == "running":
            sleep(interval_s)
            with suppress(ValueError, OSError):  # a file that Tune is replacing is read the next time
                analysis = analysis.reload()
            live.update(fitting(analysis), refresh=True)
    return analysis
