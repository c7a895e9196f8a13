"""`horovod-tune show`: prints an experiment in the terminal with rich, once or while it runs."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
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
from horovod_tune.analysis.trial_details import error_line, iterations_of
from horovod_tune.analysis.varying_parameters import text_of, varying_parameters

_STYLES = {"TERMINATED": "", "RUNNING": "cyan", "PENDING": "dim", "PAUSED": "dim", "ERROR": "bold red"}
_CONFIG_LINES, _LINES = 60, 5  # at most: of the best configuration; of failures, and again of problems
_FIXED_WIDTH, _COLUMN_WIDTH = 68, 12  # characters: of the columns that every table has; of a hyperparameter's


def view(analysis: Analysis, *, rows: int = 20, width: int = 100, with_summary: bool = True) -> Group:
    """Return the experiment for rich to print: the best trial, a table of trials, failures, a summary.

    The table has only the hyperparameters that fit into `width` characters.
    """
    known = (state_text(analysis), trials_text(analysis), wall_text(analysis))
    head = Text.assemble(_safe(analysis.name, "bold"), _safe("  " + " · ".join(filter(None, known))))
    parts: list[RenderableType] = [head, Text()]
    if len(analysis.runs) > 1:
        parts += [_safe(several_runs(analysis.record), "yellow"), Text()]
    parts += [*_best(analysis), _table(analysis, rows, width), Text()]
    errors = analysis.errors()
    if errors:
        parts.append(Text(f"{len(errors)} failed", style="bold red"))
        parts += [_safe(f"  {trial}: {error_line(text)}") for trial, text in list(errors.items())[:_LINES]]
        parts += [Text(f"  and {len(errors) - _LINES} more")] if len(errors) > _LINES else []
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


def _best(analysis: Analysis) -> list[RenderableType]:
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
    return [line, Text("\n".join(written)), _safe(f"checkpoint: {checkpoint}"), Text()]


def _table(analysis: Analysis, rows: int, width: int) -> Table:
    found = varying_parameters(analysis)
    shown = found[: max(0, (width - _FIXED_WIDTH) // _COLUMN_WIDTH)]
    left = {"trials": len(analysis.trials) - rows, "hyperparameters": len(found) - len(shown)}
    order = analysis.ranked[:rows]
    trials = [analysis.trials[number] for number in order]
    # Each has a name, is aligned on the right or not, and has a text for each trial.
    columns: list[tuple[str, bool, list[Text]]] = [
        ("trial", False, [_safe(trial.trial_id) for trial in trials]),
        ("status", False, [_safe(t.shown_status, _STYLES.get(t.status, "")) for t in trials]),
    ]
    if analysis.is_scored:  # also if no trial meets the limits
        reports = analysis.reports[analysis.reports["known"]]
        curves = [reports.loc[reports["trial"] == number, "value"].to_numpy() for number in order]
        scores = analysis.scores.loc[order]
        for name, values in ((analysis.metric or "", scores["last"]), ("best", scores["best"])):
            columns.append((name, True, [_number(analysis.value_text(v, digits=5)) for v in values]))
        columns.append(("curve", False, [Text(sparkline(curve, 16), style="cyan") for curve in curves]))
    for name, numbers in analysis.unranked().items():
        columns.append((name, True, [Text(_short(numbers[number])) for number in order]))
    columns.append(("it", True, [Text(str(iterations_of(trial) or "")) for trial in trials]))
    for one in shown:
        columns.append((one.name, False, [_safe(_short(one.values[number])) for number in order]))

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption_justify="left")
    for name, on_the_right, _ in columns:
        table.add_column(
            _safe(name),
            justify="right" if on_the_right else "left",
            no_wrap=True,
            min_width=8 if name == "curve" else None,
        )
    for number, *cells in zip(order, *(texts for *_, texts in columns), strict=True):
        table.add_row(*cells, style="bold" if number == analysis.best_number else "")
    more = ", ".join(f"{count} more {what}" for what, count in left.items() if count > 0)
    table.caption = _safe(f"not shown: {more}") if more else None
    return table


def _number(text: str) -> Text:
    return Text("nan", style="dim") if text in ("nan", "inf", "-inf") else Text(text)


def _short(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else text_of(value)


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
        return view(seen, rows=fit, width=screen.width, with_summary=False)

    with suppress(KeyboardInterrupt), Live(fitting(analysis), console=screen, auto_refresh=False) as live:
        while analysis.state == "running":
            sleep(interval_s)
            with suppress(ValueError, OSError):  # a file that Tune is replacing is read the next time
                analysis = analysis.reload()
            live.update(fitting(analysis), refresh=True)
    return analysis
