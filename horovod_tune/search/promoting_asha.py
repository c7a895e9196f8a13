"""A scheduler that pauses trials at rungs and continues the best as soon as they are known."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from ray.tune.experiment import Trial
from ray.tune.result import DEFAULT_METRIC, SHOULD_CHECKPOINT, TRAINING_ITERATION
from ray.tune.schedulers import TrialScheduler
from ray.tune.utils import flatten_dict

from horovod_tune import bounds
from horovod_tune.analysis.reader.trial_files import rows_of
from horovod_tune.ray_compat.patches.paused_trials import mend_paused_trials
from horovod_tune.ray_compat.queries import stored_results
from horovod_tune.ray_compat.schedules import acquire_slot, release_slot
from horovod_tune.scoring import as_number, check_metric_name

logger = logging.getLogger(__name__)


class Rungs:
    """Which trials wait, and which one continues; `levels` are the times of the rungs, increasing.

    >>> rungs = Rungs([2, 6], factor=2)
    >>> [rungs.reach("a", 2, 0.5), rungs.next()]
    [True, None]
    >>> [rungs.reach("b", 2, 0.4), rungs.next()]
    [True, 'a']
    """

    def __init__(self, levels: list[float], factor: float) -> None:
        self.levels, self._factor = levels, factor
        #: What trials reported at each rung, larger being better.
        self.values: list[dict[str, float]] = [{} for _ in levels]
        self.waiting: set[str] = set()

    def rung_of(self, trial: str) -> int:
        """Return the index of the last rung that a trial has reached; -1 for none."""
        return sum(trial in values for values in self.values) - 1

    def reach(self, trial: str, time: float, value: float) -> bool:
        """Record a report of a trial that does not wait; return True if it now waits at a rung."""
        reached = sum(time >= level for level in self.levels) - 1
        passed = range(self.rung_of(trial) + 1, reached + 1)
        for rung in passed:
            self.values[rung][trial] = value
        if passed:
            self.waiting.add(trial)
        return bool(passed)

    def rank(self, trial: str) -> tuple[int, int]:
        """Return a trial's place (from 1) at its last rung, and how many trials have reached that rung."""
        values = self.values[self.rung_of(trial)]
        return 1 + sum(value > values[trial] for value in values.values()), len(values)

    def next(self, of_all: bool = False) -> str | None:
        """Promote and return the next trial to continue, from the highest rung possible, or None.

        With `of_all`, it is the best that waits there, otherwise one of the best `1 / factor` of the rung.
        """
        for rung, values in reversed(list(enumerate(self.values))):
            best = sorted(values, key=lambda trial: values[trial], reverse=True)
            for trial in best if of_all else best[: int(len(values) / self._factor + 1e-9)]:
                if trial in self.waiting and self.rung_of(trial) == rung:
                    self.waiting.remove(trial)
                    return trial
        return None


class PromotingASHA(TrialScheduler):
    """A scheduler for Tune: asynchronous successive halving with promotions.

    Every trial pauses at each *rung*: after `grace_period`, `grace_period * reduction_factor`, ... It
    continues from its checkpoint once it is among the best `1 / reduction_factor` of all trials that have
    reached the rung (Li et al., 2020, "A System for Massively Parallel Hyperparameter Tuning").

        tune.run(trainable, search_alg=ConcurrencyLimiter(BayesOptSearch(), max_concurrent=4),
                 scheduler=PromotingASHA(max_t=52, grace_period=2), metric="loss", mode="min", ...)

    A paused trial holds no resources and does not count towards `max_concurrent`. When the search has no more
    trials, the best paused trial continues, until some trial has been trained to the end; then all paused
    trials end. A trial whose function saves no checkpoints cannot be paused: it continues if it is among the
    best at the rung so far, and ends otherwise. A trial whose metric is NaN or infinite at a rung ends. After
    `Tuner.restore`, paused trials are paused again.

    Args:
        time_attr: the metric that measures a trial's progress.
        metric: trials are compared by it; may also come from the tuner.
        mode: "min" or "max"; may also come from the tuner.
        max_t: where a whole training ends, in units of `time_attr`.
        grace_period: the first rung.
        reduction_factor: the best `1 / reduction_factor` of the trials at a rung continue; each rung is at
            `reduction_factor` times the training time of the one before. At least 1.1.

    Raises:
        ValueError: For an argument of the wrong type or out of bounds.
    """

    def __init__(
        self,
        time_attr: str = TRAINING_ITERATION,
        metric: str | None = None,
        mode: str | None = None,
        max_t: float = 100,
        grace_period: float = 1,
        reduction_factor: float = 3,
    ) -> None:
        super().__init__()
        mend_paused_trials()
        if mode is not None:
            bounds.one_of("mode", mode, ("min", "max"))
        check_metric_name("time_attr", time_attr)
        if metric is not None:
            check_metric_name("metric", metric)
        bounds.number("max_t", max_t, more_than=0)
        bounds.number(f"grace_period (with max_t={max_t!r})", grace_period, more_than=0, at_most=max_t)
        # Each report looks through all rungs, of which factors just above 1 would make millions.
        bounds.number("reduction_factor", reduction_factor, at_least=1.1)
        self._time_attr, self._metric, self._mode = time_attr, metric, mode
        self._max_t = max_t
        levels = [grace_period] if grace_period < max_t else []
        while levels and levels[-1] * reduction_factor < max_t:
            levels.append(levels[-1] * reduction_factor)
        self._rungs, self._factor = Rungs(levels, reduction_factor), reduction_factor
        self._trials: dict[str, Trial] = {}
        # Trials that were continued and have not reported since, in order.
        self._continuing: dict[str, None] = {}
        # True if a trial was trained to the end; trials that ended at a rung were not.
        self._has_finished = False
        self._ended_at_rung: set[str] = set()
        # Trials that are paused before a checkpoint exists; pausing saves the last commit, if there is one.
        self._tries_to_pause: set[str] = set()
        # By rung: True if pausing one of these trials saved a checkpoint.
        self._saves: dict[int, bool] = {}
        # Trials that failed while being paused; after the retry they pause at their next report.
        self._failed_waiting: set[str] = set()
        self._is_restored = False
        self._warned_of_time = False

    # Tune's callbacks.

    def set_search_properties(self, metric: str | None, mode: str | None, **spec: Any) -> bool:
        if (self._metric and metric) or (self._mode and mode):
            return False
        self._mode = mode or self._mode
        self._metric = metric or self._metric or (DEFAULT_METRIC if self._mode else None)
        return True

    def on_trial_add(self, tune_controller: Any, trial: Trial) -> None:
        if not self._metric or not self._mode:
            raise ValueError(
                "PromotingASHA needs a metric and a mode, from its own arguments or the tuner's; it has "
                f"metric={self._metric!r}, mode={self._mode!r}"
            )
        is_retry = trial.trial_id in self._trials  # it failed and is retried
        self._trials[trial.trial_id] = trial
        if not is_retry and trial.last_result:
            self._resume(tune_controller, trial)

    def on_trial_result(self, tune_controller: Any, trial: Trial, result: Mapping[str, Any]) -> str:
        trial_id = trial.trial_id
        self._continuing.pop(trial_id, None)
        if trial_id in self._failed_waiting:
            self._failed_waiting.remove(trial_id)
            self._rungs.waiting.add(trial_id)
            release_slot(tune_controller, trial_id)
            return TrialScheduler.PAUSE
        time, gain = self._read(result)
        if time is None and not self._warned_of_time:
            self._warned_of_time = True
            logger.warning(
                "trial %s reported no number for the time_attr %r, so PromotingASHA cannot determine "
                "its rung, and the trial continues; it reported %s",
                trial_id,
                self._time_attr,
                sorted(flatten_dict(dict(result))),
            )
        if time is None or gain is None:
            return TrialScheduler.CONTINUE
        if time >= self._max_t:
            return TrialScheduler.STOP
        if not self._rungs.reach(trial_id, time, gain):
            return TrialScheduler.CONTINUE
        if gain == -math.inf:
            return self._end_at_rung(tune_controller, trial_id)
        place, of = self._rungs.rank(trial_id)
        saves = self._saves.get(self._rungs.rung_of(trial_id))
        if not (saves or result.get(SHOULD_CHECKPOINT) or trial.checkpoint is not None):
            if place <= max(of / self._factor, 1):
                self._rungs.waiting.remove(trial_id)
                return TrialScheduler.CONTINUE
            if saves is False:
                return self._end_at_rung(tune_controller, trial_id)
            self._tries_to_pause.add(trial_id)
            following = None
        else:
            following = self._rungs.next()
            if following == trial_id:
                return TrialScheduler.CONTINUE
        logger.info("trial %s paused at %g: number %d of %d trials at this rung", trial_id, time, place, of)
        release_slot(tune_controller, trial_id)
        if following is not None:
            self._continue(tune_controller, following)
        return TrialScheduler.PAUSE

    def on_trial_complete(self, tune_controller: Any, trial: Trial, result: Mapping[str, Any]) -> None:
        self._forget(trial.trial_id)
        _, gain = self._read(flatten_dict(dict(result or {})))
        if trial.trial_id not in self._ended_at_rung and gain != -math.inf:
            self._has_finished = True

    def on_trial_error(self, tune_controller: Any, trial: Trial) -> None:
        if trial.trial_id in self._rungs.waiting:
            self._failed_waiting.add(trial.trial_id)
            # If it isn't tried again, Tune's limiters tell the search only of trials that they count.
            acquire_slot(tune_controller, trial.trial_id)
        self._forget(trial.trial_id)

    def on_trial_remove(self, tune_controller: Any, trial: Trial) -> None:
        self._forget(trial.trial_id)

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """Return the trial to continue, otherwise the next new one."""
        self._end_those_without_checkpoint(tune_controller)
        while self._is_restored and (following := self._rungs.next()) is not None:
            self._continue(tune_controller, following)
        self._is_restored = False
        for trial_id in self._continuing:
            # A trial that is still being saved is not ready.
            if self._trials[trial_id].status in (Trial.PAUSED, Trial.PENDING):
                return self._trials[trial_id]
        trials = tune_controller.get_trials()
        # A paused trial that does not wait at a rung was paused to change its resources.
        for status in (Trial.PENDING, Trial.PAUSED):
            for trial in trials:
                if trial.status == status and trial.trial_id not in self._rungs.waiting:
                    return trial
        runs = self._continuing or any(trial.status == Trial.RUNNING for trial in trials)
        if runs or not self._rungs.waiting or not tune_controller.search_alg.is_finished():
            return None
        return self._continue_best(tune_controller)

    def debug_string(self) -> str:
        parts = []
        for level, values in zip(self._rungs.levels, self._rungs.values, strict=True):
            left = len(values.keys() - self._rungs.waiting)
            parts.append(f"{level:g}: {len(values)} trials, {left} of them continued or ended")
        return f"PromotingASHA: {'; '.join(parts)}"

    def _read(self, result: Mapping[str, Any]) -> tuple[float | None, float | None]:
        """Return a report's time and its metric, larger being better, -inf if it is not finite."""
        time, value = as_number(result.get(self._time_attr)), as_number(result.get(str(self._metric)))
        if value is None:
            return time, None
        gain = value if self._mode == "max" else -value
        return time, gain if math.isfinite(gain) else -math.inf

    def _end_at_rung(self, controller: Any, trial_id: str) -> str:
        self._rungs.waiting.remove(trial_id)
        self._ended_at_rung.add(trial_id)
        # It has reached the rung too, so one that waits there may now be among the best.
        if (following := self._rungs.next()) is not None:
            self._continue(controller, following)
        return TrialScheduler.STOP

    def _continue(self, controller: Any, trial_id: str) -> None:
        place, of = self._rungs.rank(trial_id)
        logger.info("trial %s continues: number %d of %d trials at its rung", trial_id, place, of)
        acquire_slot(controller, trial_id)
        self._continuing[trial_id] = None

    def _forget(self, trial_id: str) -> None:
        self._rungs.waiting.discard(trial_id)
        self._continuing.pop(trial_id, None)
        self._tries_to_pause.discard(trial_id)

    def _end_those_without_checkpoint(self, controller: Any) -> None:
        """End paused trials whose pause saved no checkpoint: they could only start over."""
        for trial_id, trial in self._trials.items():
            if trial_id not in self._tries_to_pause or trial.status != Trial.PAUSED:
                continue
            self._tries_to_pause.remove(trial_id)
            if trial.checkpoint is None and not self._saves:
                logger.warning(
                    "trial %s reached a rung without a checkpoint, so PromotingASHA cannot pause trials "
                    "at that rung: it ends those that are not among the best",
                    trial_id,
                )
            self._saves[self._rungs.rung_of(trial_id)] = trial.checkpoint is not None
            if trial.checkpoint is None:
                acquire_slot(controller, trial_id)
                controller.stop_trial(trial)

    def _continue_best(self, controller: Any) -> Trial | None:
        """Continue the best trial if none has been trained to the end; otherwise end those that wait."""
        if not self._has_finished and (best := self._rungs.next(of_all=True)) is not None:
            self._continue(controller, best)
            return self._trials[best]
        for trial_id in [each for each in self._trials if each in self._rungs.waiting]:
            controller.stop_trial(self._trials[trial_id])
        return None

    def _resume(self, controller: Any, trial: Trial) -> None:
        """Restore a trial of an interrupted search from its saved reports."""
        result = flatten_dict(trial.last_result)
        time, latest = self._read(result)
        if time is None:
            return
        # By time, since a restarted trial has two reports for each step after its last checkpoint.
        reports = dict(map(self._read, [*map(flatten_dict, reports_of(trial)), result]))
        numbers = [(at, gain) for at, gain in reports.items() if at is not None and gain is not None]
        until = [(at, gain) for at, gain in sorted(numbers) if at <= time and at < self._max_t]
        for at, gain in until:
            self._rungs.reach(trial.trial_id, at, gain)
        waits = trial.trial_id in self._rungs.waiting
        self._rungs.waiting.discard(trial.trial_id)
        if trial.status == Trial.TERMINATED and time >= self._max_t and latest != -math.inf:
            self._has_finished = True
        # If a trial reported again after its rung, it was already continued. `between` is the time from one
        # report to the next.
        between = time / max(as_number(result.get(TRAINING_ITERATION)) or 1.0, 1.0)
        if trial.status != Trial.PENDING:
            return
        if not waits or time - between >= self._rungs.levels[self._rungs.rung_of(trial.trial_id)]:
            acquire_slot(controller, trial.trial_id)
            return
        self._rungs.waiting.add(trial.trial_id)
        self._is_restored = True
        trial.set_status(Trial.PAUSED)
        release_slot(controller, trial.trial_id)
        if trial.checkpoint is None:
            self._tries_to_pause.add(trial.trial_id)


def reports_of(trial: Trial) -> list[dict[str, Any]]:
    """Return a trial's stored reports, in order; one that was cut is left out."""
    return rows_of(stored_results(trial), tell=lambda what: None)
