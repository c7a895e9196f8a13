"""How progress looks: a live table in a terminal (rich), plain lines elsewhere."""

from __future__ import annotations

import atexit
import math
from typing import TYPE_CHECKING, Any

from horovod_tune.analysis.printable import one_line
from horovod_tune.analysis.progress_state import Progress, TrialProgress
from horovod_tune.analysis.report.run_facts import duration
from horovod_tune.analysis.sparkline import sparkline
from horovod_tune.analysis.varying_parameters import text_of

if TYPE_CHECKING:
    from rich.console import Group

_ROWS = 16  # running trials shown at a time; the rest are counted


# New best values, and how far the search is, are said at most this often: short trials have many of both.
_PAUSE_S = 5.0
_NEWS, _SUMMARY = "a new best value", "the summary"


def summary(progress: Progress, now: float) -> str:
    """The search in one line.

    >>> summary(Progress(total=4, began=0.0), 65.0)
    '0 of 4 trials ended · 1 min 5 s'
    """
    ended = progress.count("done") + progress.count("failed")
    parts = [f"{ended} of {progress.total} trials ended" if progress.total else f"{ended} trials ended"]
    if progress.count("running"):
        parts.append(f"{progress.count('running')} running")
    if progress.count("paused"):
        parts.append(f"{progress.count('paused')} paused")
    if progress.count("failed"):
        parts.append(f"{progress.count('failed')} failed")
    parts.append(duration(max(0.0, now - progress.began)))
    left = progress.left_s(now)
    if left is not None and progress.count("running"):
        parts.append(f"about {duration(left)} left")
    if progress.best_trial is not None:
        parts.append(f"best {progress.metric} {progress.best_value:.6g} ({progress.best_trial})")
    return " · ".join(parts)


def settings(config: dict[str, Any]) -> str:
    """A configuration's sampled values in one line: `lr=0.01 width=64`."""
    return " ".join(f"{name}={text_of(value)}" for name, value in config.items())


def trial_text(trial: TrialProgress, metric: str | None, now: float) -> str:
    """One trial in one line."""
    goal = f" of {trial.goal:g}" if trial.goal is not None else ""
    parts = [f"{trial.trial_id} {trial.state}", f"iteration {trial.iteration}{goal}"]
    if metric is not None and trial.values:
        parts.append(f"{metric} {trial.values[-1]:.6g}")
    parts.append(duration((trial.ended or now) - trial.began))
    left = trial.left_s(now)
    if left is not None:
        parts.append(f"about {duration(left)} left")
    return " · ".join(parts)


def running_trials(progress: Progress, most: int) -> tuple[list[TrialProgress], int]:
    """The newest running trials, and how many more there are."""
    running = [trial for trial in progress.trials.values() if trial.state in ("running", "restarting")]
    return running[-most:], max(0, len(running) - most)


def table_cells(trial: TrialProgress, now: float) -> tuple[str, str, str, str, str, str]:
    """A running trial in the cells of a table: name, iteration, value, curve, time, configuration."""
    left = trial.left_s(now)
    return (
        one_line(trial.trial_id),
        f"{trial.iteration}" + (f"/{trial.goal:g}" if trial.goal is not None else ""),
        f"{trial.values[-1]:.5g}" if trial.values else "",
        sparkline(trial.values, 16),
        f"{duration(left)} left" if left is not None else duration(now - trial.began),
        one_line(settings(trial.config)),
    )


class PlainView:
    """Plain lines: starts, ends, new best values, and each trial's progress now and then."""

    def __init__(self, stream: Any, every_s: float):
        self._stream, self._every_s = stream, every_s
        self._said: dict[str, float] = {}

    def tell(self, what: str, trial_id: str, progress: Progress, now: float) -> None:
        trial = progress.trials.get(trial_id)
        if trial is None:
            return
        if what == "started":
            self._print(f"{trial_id} started  {settings(trial.config)}".rstrip())
        elif what == "resumed":
            self._print(f"{trial_id} goes on after iteration {trial.iteration}")
        elif what == "better":
            if not self._is_time(_NEWS, now):
                return
            self._print(f"{trial_text(trial, progress.metric, now)} · best so far")
        elif what in ("done", "failed", "restarting"):
            self._print(trial_text(trial, progress.metric, now))
            if what != "restarting" and self._is_time(_SUMMARY, now):
                self._print(summary(progress, now))
        elif now - self._said.get(trial_id, -math.inf) >= self._every_s:
            self._print(trial_text(trial, progress.metric, now))
        else:
            return
        self._said[trial_id] = now

    def _is_time(self, what: str, now: float) -> bool:
        """Whether ``what`` may be said again: each at most every few seconds."""
        if now - self._said.get(what, -math.inf) < min(_PAUSE_S, self._every_s):
            return False
        self._said[what] = now
        return True

    def tick(self, progress: Progress, now: float) -> None:
        pass

    def close(self, progress: Progress, now: float) -> None:
        self._print(f"search ended: {summary(progress, now)}")

    def _print(self, line: str) -> None:
        print(one_line(line), file=self._stream, flush=True)


class LiveView:
    """A table at the terminal's foot, redrawn at most four times a second; other output scrolls above it."""

    def __init__(self, stream: Any):
        try:
            from rich.console import Console
            from rich.live import Live
        except ImportError as error:
            raise ImportError("live progress needs rich: pip install 'horovod_tune[analysis]'") from error
        self._console = Console(file=stream, force_terminal=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()
        atexit.register(self._live.stop)  # an error must not leave the cursor hidden
        self._drawn = -math.inf

    def tell(self, what: str, trial_id: str, progress: Progress, now: float) -> None:
        if what == "failed":
            line = trial_text(progress.trials[trial_id], progress.metric, now)
            self._console.print(one_line(line), markup=False)
        self.tick(progress, now)

    def tick(self, progress: Progress, now: float) -> None:
        if now - self._drawn >= 0.25:
            self._drawn = now
            self._live.update(self.render(progress, now), refresh=True)

    def close(self, progress: Progress, now: float) -> None:
        self._live.stop()
        atexit.unregister(self._live.stop)
        self._console.print(one_line(f"search ended: {summary(progress, now)}"), markup=False)

    def render(self, progress: Progress, now: float) -> Group:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, show_header=False)
        shown, more = running_trials(progress, max(1, min(_ROWS, self._console.height - 5)))
        for trial in shown:
            name, iteration, value, curve, left, config = table_cells(trial, now)
            table.add_row(
                Text(name, style="bold" if trial.trial_id == progress.best_trial else ""),
                Text(iteration),
                Text(value),
                Text(curve, style="cyan"),
                Text(left, style="dim"),
                Text(config, style="dim", overflow="ellipsis", no_wrap=True),
            )
        parts: list[Any] = [table]
        if more:
            parts.append(Text(f"and {more} more running", style="dim"))
        parts.append(Text(one_line(summary(progress, now)), style="bold"))
        return Group(*parts)
