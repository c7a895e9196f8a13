"""What is known of a search while it runs: pure bookkeeping, without Ray and without a screen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from horovod_tune.analysis.scoring import is_better, value_of


@dataclass
class TrialProgress:
    """One trial's progress; times are Unix times in seconds, `goal` its last iteration where it is known."""

    trial_id: str
    began: float
    goal: float | None = None
    config: dict[str, Any] = field(default_factory=dict)
    state: str = "running"
    iteration: int = 0
    first_iteration: int | None = None
    first_time: float | None = None
    last_time: float | None = None
    values: list[float] = field(default_factory=list)
    best: float = math.nan
    ended: float | None = None

    def left_s(self, now: float) -> float | None:
        """Seconds until its last iteration, at the pace since its first report; None where not known."""
        if self.state != "running" or self.goal is None or self.first_iteration is None:
            return None
        if self.iteration <= self.first_iteration or self.last_time is None or self.first_time is None:
            return None
        pace = (self.last_time - self.first_time) / (self.iteration - self.first_iteration)
        return max(0.0, (self.goal - self.iteration) * pace - (now - self.last_time))


@dataclass
class Progress:
    """All trials' progress, and the best value so far.

    `total` is how many trials there will be, `goal` the iteration at which each ends, `budget_s` the time
    budget: None where it is not known.
    """

    metric: str | None = None
    mode: str | None = None
    total: int | None = None
    goal: float | None = None
    budget_s: float | None = None
    began: float = 0.0
    trials: dict[str, TrialProgress] = field(default_factory=dict)
    best_trial: str | None = None
    best_value: float = math.nan
    best_config: dict[str, Any] = field(default_factory=dict)

    def started(
        self, trial_id: str, now: float, *, goal: Any = None, config: Mapping[str, Any] | None = None
    ) -> None:
        known = self.trials.get(trial_id)
        ends = goal if isinstance(goal, (int, float)) else self.goal
        if known is None:
            self.trials[trial_id] = TrialProgress(trial_id, now, ends, dict(config or {}))
        else:  # resumed or started again: its pace is measured anew
            known.state, known.first_iteration, known.first_time, known.ended = "running", None, None, None

    def reported(self, trial_id: str, result: Mapping[str, Any], now: float) -> bool:
        """Note a report; returns whether it is the best value so far."""
        if trial_id not in self.trials:
            self.started(trial_id, now)
        trial = self.trials[trial_id]
        iteration = result.get("training_iteration")
        trial.iteration = iteration if isinstance(iteration, int) else trial.iteration + 1
        trial.last_time = now
        if trial.first_iteration is None:
            trial.first_iteration, trial.first_time = trial.iteration, now
        if self.metric is None or self.mode is None:
            return False
        value = value_of(result, self.metric)
        if value is None:
            return False
        trial.values.append(value)
        if is_better(value, trial.best, self.mode):
            trial.best = value
        if is_better(value, self.best_value, self.mode):
            self.best_value, self.best_trial = value, trial_id
            self.best_config = trial.config
            return True
        return False

    def is_paused(self, trial_id: str) -> bool:
        return trial_id in self.trials and self.trials[trial_id].state == "paused"

    def paused(self, trial_id: str) -> None:
        if trial_id in self.trials:
            self.trials[trial_id].state = "paused"

    def ended(self, trial_id: str, state: str, now: float) -> None:
        if trial_id in self.trials:
            self.trials[trial_id].state = state
            self.trials[trial_id].ended = now

    def count(self, state: str) -> int:
        return sum(trial.state == state for trial in self.trials.values())

    def left_s(self, now: float) -> float | None:
        """Seconds until the search ends, estimated; None where it cannot be known.

        What is left to start takes as long as the ended trials took on average, as many at a time as run
        now; a trial that runs counts with what it lacks to that average. A time budget bounds it.
        """
        budget = None if self.budget_s is None else max(0.0, self.began + self.budget_s - now)
        spans = [t.ended - t.began for t in self.trials.values() if t.state in ("done", "failed") and t.ended]
        running = [t for t in self.trials.values() if t.state == "running"]
        if self.total is None or not spans:
            ahead = [trial.left_s(now) for trial in running]
            known = [seconds for seconds in ahead if seconds is not None]
            everything = self.total is not None and len(self.trials) >= self.total
            if everything and running and len(known) == len(running):
                return max(known) if budget is None else min(budget, max(known))
            return budget
        mean = sum(spans) / len(spans)
        waiting = max(0, self.total - len(self.trials)) + self.count("restarting")
        work = waiting * mean
        for trial in running:
            left = trial.left_s(now)
            work += left if left is not None else max(0.0, mean - (now - trial.began))
        estimate = work / max(1, len(running))
        return estimate if budget is None else min(budget, estimate)
