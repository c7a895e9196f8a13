"""How progress looks in a notebook: one output of the cell, redrawn in place."""

from __future__ import annotations

import math
import sys
from html import escape
from typing import Any

from horovod_tune.analysis.printable import one_line
from horovod_tune.analysis.progress_state import Progress, TrialProgress
from horovod_tune.analysis.progress_view import running_trials, summary, table_cells

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
    shown, more = running_trials(progress, _ROWS)
    rows = "".join(_row(trial, now) for trial in shown)
    table = f"<table><tbody>{rows}</tbody></table>" if rows else ""
    left = f"<div>and {more} more running</div>" if more else ""
    return f"<div>{table}{left}<div><strong>{_text(summary(progress, now))}</strong></div></div>"


def _row(trial: TrialProgress, now: float) -> str:
    return f"<tr>{''.join(f'<td>{_text(cell[:200])}</td>' for cell in table_cells(trial, now))}</tr>"


def _text(value: str) -> str:
    return escape(one_line(value))
