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

from horovod_tune.analysis.printable import one_line, printable, python_text, sparkline, text_of
from horovod_tune.analysis.results import Results
from horovod_tune.analysis.run_summary import (
    comparison_text,
    run_summary,
    state_text,
    trials_text,
    wall_text,
)
from horovod_tune.analysis.trial_details import error_line, iterations_of

_STYLES = {"TERMINATED": "", "RUNNING": "cyan", "PENDING": "dim", "PAUSED": "dim", "ERROR": "bold red"}
_CONFIG_LINES, _LINES = 60, 5  # at most: of the best configuration; of failures, of problems and so on
# In characters. Names are cut to no less than the first, texts of hyperparameters always to the second.
_NAME, _TEXT, _GAP = 12, 24, 3


def view(
    analysis: Results, *, rows: int = 20, width: int = 100, with_summary: bool = True, is_live: bool = False
) -> Group:
    """Return the experiment for rich to print: the best trial, a table of trials, failures, a summary.

    The table has only the columns that fit into `width` characters. Ids and numbers are never cut.
    """
    facts = (state_text(analysis), trials_text(analysis), wall_text(analysis))
    head = Text.assemble(_safe(analysis.name, "bold"), _safe("  " + " · ".join(filter(None, facts))))
    parts: list[RenderableType] = [head, Text()]
    if note := analysis.record.runs_note:
        parts += [_safe(note, "yellow"), Text()]
    parts += [*_best(analysis, is_live), _table(analysis, rows, width), Text()]
    failures = [f"{trial}: {error_line(text)}" for trial, text in analysis.errors().items()]
    parts += _bounded(f"{len(failures)} failed", "bold red", failures)
    changes = [f"{where}: {why}" for where, why in analysis.rank_changes]
    parts += _bounded("Changes of ranks", "bold", changes)
    parts += _bounded("Not read completely", "yellow", list(map(str, analysis.problems)))
    if with_summary:
        parts += [_safe(f"{name:<21} {text}", "dim") for name, text in run_summary(analysis)[4:]]
    return Group(*parts)


def _bounded(title: str, style: str, lines: list[str]) -> list[RenderableType]:
    """Return at most `_LINES` lines below a title, and how many more there are; nothing without lines."""
    more = [f"and {len(lines) - _LINES} more"] if len(lines) > _LINES else []
    shown = [_safe(f"  {line}") for line in (*lines[:_LINES], *more)]
    return [Text(title, style=style), *shown, Text()] if lines else []


def as_html(shown: RenderableType) -> str:
    """Convert what rich can print to HTML without scripts, for a notebook."""
    screen = Console(record=True, file=io.StringIO(), width=160, force_jupyter=False)
    screen.print(shown)
    look = '<pre style="line-height: 1.2; overflow-x: auto">{code}</pre>'
    return screen.export_html(inline_styles=True, code_format=look)


def _safe(text: str, style: str = "") -> Text:
    """Return text from the experiment's files, in which nothing steers the terminal."""
    return Text(one_line(text), style=style)


def _best(analysis: Results, is_live: bool) -> list[RenderableType]:
    if analysis.best_number is None:
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


def _table(analysis: Results, rows: int, width: int) -> Table:
    order = analysis.ranked[:rows]
    trials = [analysis.trials[number] for number in order]
    status = _Column("status", [_safe(t.shown_status, _STYLES.get(t.status, "")) for t in trials])
    iterations = _Column("it", [Text(str(iterations_of(trial) or "")) for trial in trials], True)
    columns = [_Column("trial", [_safe(trial.trial_id) for trial in trials]), status]
    spare = [status, iterations]  # left out in this order if the screen is too narrow
    if analysis.is_scored:  # also if no trial meets the limits
        reports = analysis.reports[analysis.reports["has_value"]]
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
    parameters = [
        _Column(one.name, [_safe(_short(one.values[number])) for number in order])
        for one in analysis.varying_parameters
    ]
    columns += parameters

    def fits(longest: int) -> bool:
        return sum(column.width(longest) + _GAP for column in columns) - _GAP <= width

    for column in (*reversed(parameters), *spare):
        if not fits(_NAME):
            columns.remove(column)
    longest = next((n for n in range(width, _NAME, -1) if fits(n)), _NAME)

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, caption_justify="left")
    for column in columns:
        justify: JustifyMethod = "right" if column.on_the_right else "left"
        title, wide = Text(column.title(longest)), column.width(longest)
        table.add_column(title, justify=justify, no_wrap=True, width=wide)
    if not fits(longest):  # even the ids or numbers are wider
        table.width = sum(column.width(longest) + _GAP for column in columns) - _GAP
    for number, *cells in zip(order, *(column.cells for column in columns), strict=True):
        table.add_row(*cells, style="bold" if number == analysis.best_number else "")
    left_out = {"trials": len(analysis.trials) - rows, "hyperparameters": len({*parameters} - {*columns})}
    more = ", ".join(f"{count} more {what}" for what, count in left_out.items() if count > 0)
    table.caption = _safe(f"not shown: {more}") if more else None
    return table


def _number(text: str) -> Text:
    return Text("nan", style="dim") if text in ("nan", "inf", "-inf") else Text(text)


def _short(value: Any) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else text_of(value)
    cut = not isinstance(value, (int, float)) and len(text) > _TEXT
    return f"{text[: _TEXT - 1]}…" if cut else text


def watch(
    analysis: Results,
    screen: Console,
    *,
    interval_s: float = 5.0,
    rows: int = 20,
    sleep: Callable[[float], None] = time.sleep,
) -> Results:
    """Refresh the view of a running experiment every `interval_s` seconds until it has ended.

    Ctrl-C ends it earlier. The last view stays on the screen; if the console is not a terminal, no other view
    is printed. Returns the experiment as it was last read.
    """

    def fitting(seen: Results) -> Group:
        fit = max(3, min(rows, screen.height - 18))
        return view(seen, rows=fit, width=screen.width, with_summary=False, is_live=True)

    with suppress(KeyboardInterrupt), Live(fitting(analysis), console=screen, auto_refresh=False) as live:
        while analysis.state == "running":
            sleep(interval_s)
            with suppress(ValueError, OSError):  # a file that Tune is replacing is read the next time
                analysis = analysis.reload()
            live.update(fitting(analysis), refresh=True)
    return analysis
