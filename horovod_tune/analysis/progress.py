"""Runs in the driver: shows how a search progresses and, at its end, its results."""

from __future__ import annotations

import atexit
import importlib.util
import io
import math
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsFloat

from ray.tune import Callback

from horovod_tune.analysis.encoding import OTHER_SIGNS
from horovod_tune.analysis.experiment_metadata import write_metadata
from horovod_tune.analysis.last_screen import last_screen
from horovod_tune.analysis.printable import counted, digits_for, one_line, printable, sparkline
from horovod_tune.analysis.report.run_summary import duration
from horovod_tune.analysis.scoring import check_metric, value_of
from horovod_tune.analysis.varying_parameters import flat_config, text_of
from horovod_tune.best_effort import best_effort_callback

_ROWS = 16  # running trials in the live table; the others are only counted
# The shortest time between two lines on new best values, or between two summaries: short trials have many.
_PAUSE_S = 5.0
_REDRAWN_S = 0.5
_LEAST_LEFT_S = 10.0  # a shorter time left is not shown: it would be a guess
_ENDED = ("done", "stopped", "failed")
_STATES = {"TERMINATED": "done", "ERROR": "failed", "PAUSED": "paused"}


@dataclass
class TrialProgress:
    """One trial; times are Unix times in seconds; `goal` is the last iteration, None if unknown."""

    trial_id: str
    began: float
    goal: float | None = None
    settings: str = ""  # the sampled values: "lr=0.01 width=64"
    state: str = "running"
    iteration: int = 0
    ranks: Any = None
    changes: Any = None  # of the ranks of an elastic trial, so far
    values: list[float] = field(default_factory=list)
    ended: float | None = None
    is_cut: bool = False  # its last report was decided to be its last, though it has not reached its goal
    # Iteration and time of each report since the trial was last started, and when it began to train then.
    reports: list[tuple[int, float]] = field(default_factory=list)
    trains_since: float = 0.0
    trained_before_s: float = 0.0

    def stop(self, state: str, now: float) -> None:
        """Record the trial's new state: one of `_ENDED`, "paused", "restarting", or "waiting" to continue."""
        self.trained_before_s = self.trained_s(now)
        self.state, self.ended = state, now if state in _ENDED else None

    def trained_s(self, now: float) -> float:
        """Return the seconds for which the trial has trained, without its starts and pauses."""
        return self.trained_before_s + (now - self.trains_since if self.state == "running" else 0.0)

    def left_s(self, now: float) -> float | None:
        """Return the estimated seconds until the trial reaches its goal; None if unknown."""
        if self.state != "running" or self.goal is None or not self.reports:
            return None
        (first, began), (last, reported) = self.reports[0], self.reports[-1]
        if last <= first:
            return None
        pace = (reported - began) / (last - first)
        return max(0.0, (self.goal - last) * pace - (now - reported))

    def text(self, metric: str | None, now: float, digits: int = 6) -> str:
        """Return the trial in one line."""
        goal = f" of {self.goal:g}" if self.goal is not None else ""
        parts = [f"{self.trial_id} {self.state}", f"iteration {self.iteration}{goal}"]
        parts += [f"{metric} {self.values[-1]:.{digits}g}"] if self.values else []
        parts.append(duration((self.ended or now) - self.began))
        return " · ".join([*parts, *_left(self.left_s(now))])


def _left(left_s: float | None) -> list[str]:
    return [f"about {duration(left_s)} left"] if left_s is not None and left_s >= _LEAST_LEFT_S else []


@dataclass
class Progress:
    """The trials of a search and its best value; `total` is their final number, None if it is not known.

    `searched` are the names of the hyperparameters, None if they are not known. `ends` has the values at
    which a scheduler ends a whole training: {"training_iteration": 30}.
    """

    metric: str | None = None
    mode: str | None = None
    total: int | None = None
    budget_s: float | None = None
    began: float = 0.0
    trials: dict[str, TrialProgress] = field(default_factory=dict)
    best_trial: str | None = None
    best_value: float = math.nan
    searched: Collection[str] | None = None
    ends: Mapping[str, float] = field(default_factory=dict)
    most_at_once: int = 0

    def trial(self, trial_id: str, now: float) -> TrialProgress:
        """Return a trial, which begins now if it is new."""
        return self.trials.setdefault(trial_id, TrialProgress(trial_id, now))

    def started(self, trial: Any, now: float) -> TrialProgress:
        """Record the start of one of Tune's trials, which may be new, paused or restarted."""
        known = self.trial(trial.trial_id, now)
        goal = (trial.stopping_criterion or {}).get("training_iteration")
        known.goal = goal if isinstance(goal, (int, float)) else None
        # Not the values of `evaluated_params`: it has placeholders for objects, lacks what was not drawn
        # (`points_to_evaluate`, `sample_from`), and does not change under PopulationBasedTraining.
        names = self.searched if self.searched is not None else trial.evaluated_params
        values = flat_config(trial.config, names)
        chosen = [name for name in values if any(f"{name}/".startswith(f"{one}/") for one in names)]
        known.settings = " ".join(f"{name}={text_of(values[name]):.100}" for name in chosen or values)
        known.state, known.reports, known.ended, known.trains_since = "running", [], None, now
        self.most_at_once = max(self.most_at_once, self.count("running"))
        return known

    def restored(self, trial: Any, now: float) -> bool:
        """Record one of Tune's trials if it has reports from an earlier session; return True if it is new."""
        result = trial.last_result or {}
        if trial.trial_id in self.trials or "training_iteration" not in result:
            return False
        known = self.started(trial, now)
        self.reported(trial.trial_id, result, now)
        best = trial.metric_analysis.get(self.metric) or {}
        self._is_best(trial.trial_id, value_of(best, self.mode or "min"))
        known.stop(_STATES.get(trial.status, "waiting"), now)
        known.trained_before_s = value_of(result, "time_total_s") or 0.0
        known.began = now - known.trained_before_s
        return True

    def reported(self, trial_id: str, result: dict[str, Any], now: float) -> bool:
        """Record a report; return True if it has the best value so far."""
        trial = self.trial(trial_id, now)
        iteration = result.get("training_iteration")
        trial.iteration = iteration if isinstance(iteration, int) else trial.iteration + 1
        if not trial.reports:
            trial.trains_since = min(now, trial.trains_since + (value_of(result, "start_s") or 0.0))
        trial.reports.append((trial.iteration, now))
        value = value_of(result, self.metric) if self.metric is not None else None
        trial.values += [] if value is None else [value]
        return self._is_best(trial_id, value)

    def _is_best(self, trial_id: str, value: float | None) -> bool:
        if value is None or self.mode is None or not math.isfinite(value):
            return False
        if value >= self.best_value if self.mode == "min" else value <= self.best_value:  # not the first: NaN
            return False
        self.best_value, self.best_trial = value, trial_id
        return True

    def count(self, *states: str) -> int:
        return sum(trial.state in states for trial in self.trials.values())

    def left_s(self, now: float) -> float | None:
        """Return the estimated seconds until the search ends; None if unknown.

        Assumes that each trial trains as long as ended trials did on average, and that as many run at once as
        did so far. A time budget is an upper bound.
        """
        ended = [trial.trained_s(now) for trial in self.trials.values() if trial.ended is not None]
        running = [trial for trial in self.trials.values() if trial.state == "running"]
        left = [trial.left_s(now) for trial in running]
        bounds = [] if self.budget_s is None else [max(0.0, self.began + self.budget_s - now)]
        if self.total is not None and ended:
            mean = sum(ended) / len(ended)
            work = (max(0, self.total - len(self.trials)) + self.count("restarting", "waiting")) * mean
            for trial, own in zip(running, left, strict=True):
                # A scheduler may end it long before its goal.
                rest = mean - trial.trained_s(now)
                work += min(rest, own if own is not None else rest) if rest > 0 else own or 0.0
            bounds.append(work / max(1, self.most_at_once))
        elif self.total is not None and len(self.trials) >= self.total and left and None not in left:
            bounds.append(max(own for own in left if own is not None))
        return min(bounds, default=None)

    def summary(self, now: float) -> str:
        """Return the search in one line.

        >>> Progress(total=4, began=0.0).summary(65.0)
        '0 of 4 trials ended · 1 min 5 s'
        """
        parts = [self.ended_text()]
        for state in ("running", "paused", "stopped", "failed", "interrupted"):
            parts += [f"{self.count(state)} {state}"] if self.count(state) else []
        parts.append(duration(max(0.0, now - self.began)))
        parts += _left(self.left_s(now)) if self.count("running") else []
        if self.best_trial is not None:
            parts.append(f"best {self.metric} {self.best_value:.{self.digits}g} ({self.best_trial})")
        return " · ".join(parts)

    def ended_text(self) -> str:
        ended = self.count(*_ENDED)
        trials = f"{ended} of {counted(self.total, 'trial')}" if self.total else counted(ended, "trial")
        return f"{trials} ended"

    @property
    def digits(self) -> int:
        """How many digits of the metric tell the trials apart; at least 6."""
        return digits_for([trial.values[-1] for trial in self.trials.values() if trial.values], 6)

    def table(self, rows: int, now: float) -> Any:
        """Return at most `rows` running trials and the summary, for rich to print."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        columns = ("trial", "iteration", one_line(self.metric or ""), "", "time", "hyperparameters")
        table = Table(*columns, box=None, pad_edge=False, header_style="dim")
        running = [trial for trial in self.trials.values() if trial.state in ("running", "restarting")]
        for trial in running[-rows:]:
            table.add_row(
                Text(one_line(trial.trial_id), "bold" if trial.trial_id == self.best_trial else ""),
                Text(f"{trial.iteration}" + (f"/{trial.goal:g}" if trial.goal is not None else "")),
                Text(f"{trial.values[-1]:.{self.digits}g}" if trial.values else ""),
                Text(sparkline(trial.values, 16), "cyan"),
                Text("".join(_left(trial.left_s(now))) or duration(now - trial.began), "dim"),
                Text(one_line(trial.settings), "dim", overflow="ellipsis", no_wrap=True),
            )
        more = len(running) - rows
        below = [Text(f"and {more} more running", style="dim")] if more > 0 else []
        return Group(table, *below, Text(one_line(self.summary(now)), style="bold"))


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
        known = self._progress.started(trial, time.time())
        what = f"started  {known.settings}"
        if known.iteration and before in ("paused", "waiting", "restarting"):
            what = "starts over: it has saved no checkpoint"
            if trial.checkpoint is not None:
                saved = (trial.latest_checkpoint_result.metrics or {}).get("training_iteration")
                what = f"continues after iteration {saved or known.iteration}"
        self._write(known.trial_id, f"{known.trial_id} {what}".rstrip())

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        now = time.time()
        better = self._progress.reported(trial.trial_id, result, now)
        known, ranks = self._progress.trials[trial.trial_id], result.get("world_size")
        known.is_cut = bool(result.get("done")) and not self._is_whole(trial, result)
        before, known.ranks = known.ranks, ranks
        changes, known.changes = known.changes, result.get("world_changes")
        is_changed = isinstance(known.changes, int) and known.changes > (changes or 0)
        if isinstance(ranks, int) and (is_changed or before not in (None, ranks)):
            change = f"continues with {counted(ranks, 'rank')}"
            change += f" (before: {before})" if before not in (None, ranks) else ""
            change += f": {result.get('world_change')}" if is_changed else ""
            self._write(known.trial_id, f"{known.trial_id} {change}", always=True)
        text = known.text(self._progress.metric, now, self._progress.digits)
        if better and self._is_due("better", min(_PAUSE_S, self._every_s)):
            self._write(known.trial_id, f"{text} · best so far")
        elif self._is_due(known.trial_id, self._every_s):
            self._write(known.trial_id, text)

    def _is_whole(self, trial: Any, result: dict[str, Any]) -> bool:
        """Return True if a report reaches an end that was set for every trial."""
        ends = {**self._progress.ends, **(trial.stopping_criterion or {})}
        reached = ((value_of(result, name), end) for name, end in ends.items())
        return any(value is not None and value >= end for value, end in reached)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        known = self._progress.trial(trial.trial_id, time.time())
        # Tune stops a paused trial without a report.
        is_cut = known.state == "paused" and not self._is_whole(trial, trial.last_result or {})
        self._stop(trial.trial_id, "stopped" if known.is_cut or is_cut else "done")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._stop(trial.trial_id, "failed")

    def on_trial_recover(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._stop(trial.trial_id, "restarting")

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        # Tune calls no hook when a trial is paused, or when the whole search is stopped (`time_budget_s`).
        for trial in trials:
            known, state = self._progress.trials.get(trial.trial_id), _STATES.get(trial.status)
            if known is None or state is None or known.state in _ENDED:
                continue
            if state == "paused" != known.state:
                known.stop(state, time.time())
            elif state != "paused":
                self._stop(known.trial_id, "stopped" if state == "done" else state)
        view = self._view
        if view is not None and view.redraw is not None and self._is_due("table", _REDRAWN_S):
            view.redraw(self._progress.table(view.rows, time.time()))

    def on_experiment_end(self, trials: list[Any], **info: Any) -> None:
        view, self._view = self._view, None
        # Tune also calls this hook while it handles an error that ends the search. Then nothing is printed,
        # unless trials have ended.
        if view is None or (sys.exc_info()[0] is not None and not self._progress.count(*_ENDED)):
            return
        for trial in trials:  # if nothing was left to do, Tune has taken no step
            self._progress.restored(trial, time.time())
        for known in self._progress.trials.values():
            known.state = "interrupted" if known.state == "running" else known.state
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
        if state in _ENDED and self._is_due("summary", min(_PAUSE_S, self._every_s)):
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
