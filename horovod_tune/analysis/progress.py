"""Runs in the driver: shows how a search progresses and, at its end, its results."""

from __future__ import annotations

import atexit
import importlib.util
import io
import math
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat

from ray.tune import Callback

from horovod_tune.analysis.encoding import OTHER_SIGNS
from horovod_tune.analysis.last_screen import last_screen
from horovod_tune.analysis.printable import counted, one_line, printable
from horovod_tune.analysis.search_progress import ENDED, STATES, Progress
from horovod_tune.best_effort import best_effort_callback
from horovod_tune.experiment_metadata import write_metadata
from horovod_tune.scoring import check_metric, value_of

_ROWS = 16  # running trials in the live table; the others are only counted
# The shortest time between two lines on new best values, or between two summaries: short trials have many.
_PAUSE_S = 5.0
_REDRAWN_S = 0.5


@dataclass
class View:
    """Where progress is shown: as lines or, with `redraw`, as a table of at most `rows` trials.

    `stop` is called when the search ends; in a notebook it removes the table.
    """

    write: Callable[[str], None]
    redraw: Callable[[Any], None] | None = None
    rows: int = _ROWS
    stop: Callable[[], None] = lambda: None


def _view(stream: Any, live: bool | None) -> View:
    # A notebook's kernel has IPython loaded; no other process should load it to find out.
    ipython = sys.modules.get("IPython")
    shell = type(ipython.get_ipython()).__name__ if ipython is not None else ""
    in_notebook = stream is None and shell == "ZMQInteractiveShell"
    stream = stream or sys.stdout
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors=OTHER_SIGNS)  # for terminals that are not UTF-8
    has_rich = importlib.util.find_spec("rich") is not None
    if live is None:
        live = has_rich and (in_notebook or getattr(stream, "isatty", lambda: False)())
    if not live:
        return View(lambda line: print(line, file=stream, flush=True))
    if not has_rich:
        raise ImportError("live progress needs rich: pip install 'horovod_tune[analysis]'")
    if in_notebook:
        from IPython.display import HTML, display

        from horovod_tune.analysis.terminal import as_html

        cell: Any = display(HTML("<div></div>"), display_id=True)
        return View(
            print,
            redraw=lambda shown: cell.update(HTML(as_html(shown))),
            stop=lambda: cell.update(HTML("<div></div>")),
        )
    from rich.console import Console
    from rich.live import Live

    # The table is at the bottom of the terminal; all other output scrolls above it.
    console = Console(file=stream, force_terminal=True, highlight=False)
    live_table = Live(console=console, auto_refresh=False, transient=True)
    live_table.start()
    atexit.register(live_table.stop)  # an error must not leave the cursor hidden
    return View(
        lambda line: console.print(line, markup=False),
        redraw=lambda shown: live_table.update(shown, refresh=True),
        rows=max(1, min(_ROWS, console.height - 5)),
        stop=live_table.stop,
    )


@best_effort_callback("showing the progress")
class ProgressCallback(Callback):
    """Show a search's progress: in a terminal or a notebook one live line per trial, elsewhere plain lines.

    Pass it to Tune with your other callbacks; Tune's own reporter continues as before (its lines scroll above
    the live ones). Tune does not pass metric and mode to callbacks; unless they are given here, no best value
    is shown.

    ```python
    tune.RunConfig(callbacks=[ProgressCallback(metric="loss", mode="min")])
    ```

    It also writes metric and mode, package versions and the cluster's size to the experiment's folder
    (`horovod_tune_run-….json`), where `analyze` and the report find them.
    """

    def __init__(
        self,
        metric: str | None = None,
        mode: str | None = None,
        *,
        every_s: float = 30.0,
        live: bool | None = None,
        stream: Any = None,
    ):
        """Create the callback; nothing is printed before the search starts.

        `every_s` is the shortest time between two plain lines about a trial's progress, in seconds. `live`
        forces live or plain lines; by default, lines are live if rich is installed, and either `stream`
        (default: standard output) is a terminal or this is a notebook and no `stream` is given. Raises
        `ValueError` for an invalid argument, or if only one of metric and mode is given.
        """
        check_metric(metric, mode)
        if (metric is None) != (mode is None):
            raise ValueError(
                f"metric and mode must be given together, got metric={metric!r} and mode={mode!r}"
            )
        if not (isinstance(every_s, SupportsFloat) and every_s >= 0):
            raise ValueError(f"every_s must be at least 0 seconds, got {every_s!r}")
        if live not in (None, True, False):
            raise ValueError(f"live must be True, False or None, got {live!r}")
        if stream is not None and not hasattr(stream, "write"):
            raise ValueError(f"stream must be an open file, got {stream!r}")
        self._every_s, self._live, self._stream = every_s, live, stream
        self._progress = Progress(metric, mode)
        self._view: View | None = None
        self._shown: dict[str, float] = {}  # when each trial, or something else, was last shown
        self._metadata_written = False
        # What Tune does not pass to callbacks: see `Progress`.
        self.searched: Collection[str] | None = None
        self.ends: Mapping[str, float] = {}

    def __getstate__(self) -> dict[str, Any]:
        # Tune pickles its callbacks; a screen and an open stream cannot be pickled.
        return self.__dict__ | {"_view": None, "_stream": None, "_metadata_written": False}

    def setup(
        self, *args: Any, total_num_samples: Any = None, time_budget_s: Any = None, **info: Any
    ) -> None:
        total = total_num_samples if isinstance(total_num_samples, int) else 0
        budget = getattr(time_budget_s, "total_seconds", lambda: time_budget_s)()
        self._progress = Progress(
            self._progress.metric,
            self._progress.mode,
            total=total if 0 < total < 2**31 else None,
            budget_s=budget if isinstance(budget, (int, float)) and math.isfinite(budget) else None,
            began=time.time(),
            searched=self.searched,
            ends=self.ends,
        )
        self._view, self._shown = _view(self._stream, self._live), {}

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        begins = not self._progress.trials
        restored = [trial for trial in trials if self._progress.restored(trial, time.time())]
        if begins and restored and self._view is not None:
            name = Path(restored[0].storage.experiment_fs_path).name
            self._view.write(one_line(f"continues {name}: {self._progress.ended_text()}"))

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        if not self._metadata_written:
            self._metadata_written = True
            write_metadata(trial, {"metric": self._progress.metric, "mode": self._progress.mode})
        before = self._progress.trial(trial.trial_id, time.time()).state
        tracked = self._progress.started(trial, time.time())
        what = f"started  {tracked.settings}"
        if tracked.iteration and before in ("paused", "waiting", "restarting"):
            what = "starts over: it has saved no checkpoint"
            if trial.checkpoint is not None:
                saved = (trial.latest_checkpoint_result.metrics or {}).get("training_iteration")
                what = f"continues after iteration {saved or tracked.iteration}"
        self._write(tracked.trial_id, f"{tracked.trial_id} {what}".rstrip())

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        now = time.time()
        better = self._progress.reported(trial.trial_id, result, now)
        tracked, ranks = self._progress.trials[trial.trial_id], result.get("world_size")
        tracked.is_cut = bool(result.get("done")) and not self._is_whole(trial, result)
        before, tracked.ranks = tracked.ranks, ranks
        changes, tracked.changes = tracked.changes, result.get("world_changes")
        is_changed = isinstance(tracked.changes, int) and tracked.changes > (changes or 0)
        if isinstance(ranks, int) and (is_changed or before not in (None, ranks)):
            change = f"continues with {counted(ranks, 'rank')}"
            change += f" (before: {before})" if before not in (None, ranks) else ""
            change += f": {result.get('world_change')}" if is_changed else ""
            self._write(tracked.trial_id, f"{tracked.trial_id} {change}", always=True)
        text = tracked.text(self._progress.metric, now, self._progress.digits)
        if better and self._is_due("better", min(_PAUSE_S, self._every_s)):
            self._write(tracked.trial_id, f"{text} · best so far")
        elif self._is_due(tracked.trial_id, self._every_s):
            self._write(tracked.trial_id, text)

    def _is_whole(self, trial: Any, result: dict[str, Any]) -> bool:
        """Return True if a report reaches an end that was set for every trial."""
        ends = {**self._progress.ends, **(trial.stopping_criterion or {})}
        reached = ((value_of(result, name), end) for name, end in ends.items())
        return any(value is not None and value >= end for value, end in reached)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        tracked = self._progress.trial(trial.trial_id, time.time())
        # Tune stops a paused trial without a report.
        is_cut = tracked.state == "paused" and not self._is_whole(trial, trial.last_result or {})
        self._stop(trial.trial_id, "stopped" if tracked.is_cut or is_cut else "done")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._stop(trial.trial_id, "failed")

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._stop(trial.trial_id, "restarting")

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        # Tune calls no hook when a trial is paused, or when the whole search is stopped (`time_budget_s`).
        for trial in trials:
            tracked, state = self._progress.trials.get(trial.trial_id), STATES.get(trial.status)
            if tracked is None or state is None or tracked.state in ENDED:
                continue
            if state == "paused" != tracked.state:
                tracked.stop(state, time.time())
            elif state != "paused":
                self._stop(tracked.trial_id, "stopped" if state == "done" else state)
        view = self._view
        if view is not None and view.redraw is not None and self._is_due("table", _REDRAWN_S):
            view.redraw(self._progress.table(view.rows, time.time()))

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        view, self._view = self._view, None
        # Tune also calls this hook while it handles an error that ends the search. Then nothing is printed,
        # unless trials have ended.
        if view is None or (sys.exc_info()[0] is not None and not self._progress.count(*ENDED)):
            return
        for trial in trials:  # if nothing was left to do, Tune has taken no step
            self._progress.restored(trial, time.time())
        for tracked in self._progress.trials.values():
            tracked.state = "interrupted" if tracked.state == "running" else tracked.state
        view.stop()
        atexit.unregister(view.stop)  # else the driver would keep the console
        view.write(one_line(f"search ended: {self._progress.summary(time.time())}"))
        if trials:
            text = last_screen(trials, self._progress)
            print(printable(text), file=self._stream or sys.stdout, flush=True)

    def _stop(self, trial_id: str, state: str) -> None:
        now = time.time()
        trial = self._progress.trial(trial_id, now)
        trial.stop(state, now)
        text = trial.text(self._progress.metric, now, self._progress.digits)
        self._write(trial_id, text, always=state == "failed")
        if state in ENDED and self._is_due("summary", min(_PAUSE_S, self._every_s)):
            self._write("summary", self._progress.summary(now))

    def _write(self, about: str, line: str, *, always: bool = False) -> None:
        """Write a line about a trial or the search; if there is a live table, only one that must be seen."""
        if self._view is not None and (always or self._view.redraw is None):
            self._view.write(one_line(line))
            self._shown[about] = time.time()

    def _is_due(self, what: str, every_s: float) -> bool:
        now = time.time()
        if now - self._shown.get(what, -math.inf) < every_s:
            return False
        self._shown[what] = now
        return True
