"""The trials of a running search and how far they are: as text, and as a table for rich."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from horovod_tune.analysis.printable import counted, digits_for, duration, one_line, sparkline, text_of
from horovod_tune.analysis.varying_parameters import flat_config
from horovod_tune.scoring import value_of

_LEAST_LEFT_S = 10.0  # a shorter time left is not shown: it would be a guess
ENDED = ("done", "stopped", "failed")
STATES = {"TERMINATED": "done", "ERROR": "failed", "PAUSED": "paused"}


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
        """Record the trial's new state: one of `ENDED`, "paused", "restarting", or "waiting" to continue."""
        self.trained_before_s = self.trained_s(now)
        self.state, self.ended = state, now if state in ENDED else None

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
        tracked = self.trial(trial.trial_id, now)
        goal = (trial.stopping_criterion or {}).get("training_iteration")
        tracked.goal = goal if isinstance(goal, (int, float)) else None
        # Not the values of `evaluated_params`: it has placeholders for objects, lacks what was not drawn
        # (`points_to_evaluate`, `sample_from`), and does not change under PopulationBasedTraining.
        names = self.searched if self.searched is not None else trial.evaluated_params
        values = flat_config(trial.config, names)
        chosen = [name for name in values if any(f"{name}/".startswith(f"{one}/") for one in names)]
        tracked.settings = " ".join(f"{name}={text_of(values[name]):.100}" for name in chosen or values)
        tracked.state, tracked.reports, tracked.ended, tracked.trains_since = "running", [], None, now
        self.most_at_once = max(self.most_at_once, self.count("running"))
        return tracked

    def restored(self, trial: Any, now: float) -> bool:
        """Record one of Tune's trials if it has reports from an earlier session; return True if it is new."""
        result = trial.last_result or {}
        if trial.trial_id in self.trials or "training_iteration" not in result:
            return False
        tracked = self.started(trial, now)
        self.reported(trial.trial_id, result, now)
        best = trial.metric_analysis.get(self.metric) or {}
        self._is_best(trial.trial_id, value_of(best, self.mode or "min"))
        tracked.stop(STATES.get(trial.status, "waiting"), now)
        tracked.trained_before_s = value_of(result, "time_total_s") or 0.0
        tracked.began = now - tracked.trained_before_s
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
        ended = self.count(*ENDED)
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
