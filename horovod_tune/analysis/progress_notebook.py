"""How progress looks in a notebook: one output of the cell, redrawn in place."""

from __future__ import annotations

import math
import sys
from html import escape
from typing import Any

from horovod_tune.analysis.printable import one_line
from horovod_tune.analysis.progress_state import Progress, TrialProgress
from horovod_tune.analysis.progress_view import settings, summary
from horovod_tune.analysis.report.run_facts import duration
from horovod_tune.analysis.sparkline import sparkline

_ROWS = 16
_BETWEEN_S = 0.5  # every drawing is a message to the browser


def in_notebook() -> bool:
    """Whether this process is a notebook's kernel."""
    # Whoever runs in a kernel has IPython loaded; others should not load it to be asked.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"


class NotebookView:
    """A table of the running trials with their curves, and the search in one line."""

    def __init__(self) -> None:
        from IPython.display import HTML, display

        self._html = HTML
        self._output: Any = display(HTML("<div></div>"), display_id=True)
        self._drawn = -math.inf

    def tell(self, what: str, trial_id: str, progress: Progress, now: float) -> None:
        self.tick(progress, now)

    def tick(self, progress: Progress, now: float) -> None:
        if now - self._drawn >= _BETWEEN_S:
            self._drawn = now
            self._output.update(self._html(running_html(progress, now)))

    def close(self, progress: Progress, now: float) -> None:
        self._output.update(self._html(f"<div>search ended: {_text(summary(progress, now))}</div>"))


def running_html(progress: Progress, now: float) -> str:
    """The search while it runs, as a piece of HTML without scripts."""
    running = [trial for trial in progress.trials.values() if trial.state in ("running", "restarting")]
    rows = "".join(_row(trial, progress, now) for trial in running[-_ROWS:])
    more = len(running) - _ROWS
    table = f"<table><tbody>{rows}</tbody></table>" if rows else ""
    left = f"<div>and {more} more running</div>" if more > 0 else ""
    return f"<div>{table}{left}<div><strong>{_text(summary(progress, now))}</strong></div></div>"


def _row(trial: TrialProgress, progress: Progress, now: float) -> str:
    left = trial.left_s(now)
    cells = (
        trial.trial_id,
        f"{trial.iteration}" + (f"/{trial.goal:g}" if trial.goal is not None else ""),
        f"{trial.values[-1]:.5g}" if trial.values else "",
        sparkline(trial.values, 16),
        f"{duration(left)} left" if left is not None else duration(now - trial.began),
        settings(trial.config)[:200],
    )
    return f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>"


def _text(value: str) -> str:
    return escape(one_line(value))
