"""Patches how Tune counts and reports a trial's failure."""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Callable
from typing import Any

from horovod_tune.compatibility import Patch, wrap
from horovod_tune.errors import HorovodTuneError, MetricNotReported, TrainingFailed

logger = logging.getLogger(__name__)

_CONTROLLER = "ray.tune.execution.tune_controller:TuneController"


@Patch(
    "the death of a reused actor may count as two failures of its trial, and the error of a failed trial "
    "begins with frames of Ray instead of its cause",
    f"{_CONTROLLER} uses _resetting_trials",
    f"{_CONTROLLER}._trial_task_failure(self, trial, exception) uses _fail_fast RAISE "
    "_print_trial_errors _process_trial_failure",
    "ray.exceptions:RayTaskError uses proctitle pid ip",
    "ray.exceptions:RayTaskError.as_instanceof_cause(self)",
).once
def explain_failures(is_ours: Callable[[type], bool]) -> None:
    """Count each failure of a distributed trial once, and begin its text in log and error.txt with the cause.

    The death of a coordinator that is being reset for its next trial reaches Tune twice, as the actor's death
    and as the failed reset. Tune counts both, and abandons the trial at the second, whatever ``max_failures``
    is. In Tune's own text, a rank's error is below 35 frames of Ray and of this package.
    """
    from ray.exceptions import RayActorError
    from ray.tune.execution.tune_controller import TuneController

    counted: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @wrap(TuneController, "_trial_task_failure")
    def fail(original: Any, self: Any, trial: Any, exception: Exception) -> None:
        if not is_ours(trial.get_trainable_cls()):
            original(self, trial, exception)
            return
        cause = getattr(exception, "cause", None)
        if not isinstance(cause, HorovodTuneError):
            if isinstance(exception, RayActorError):
                # A dead actor cannot be reset: the trial's next actor starts like any other.
                self._resetting_trials.discard(trial)
                if counted.get(trial) is exception:
                    return
                counted[trial] = exception
            original(self, trial, exception)
            return
        short = _begin_with_cause(exception, cause)
        if self._fail_fast == self.RAISE:
            raise short
        if self._print_trial_errors:
            logger.error("Trial %s failed: %s", trial, short)
        self._process_trial_failure(trial, exception=short)


def _begin_with_cause(error: Any, cause: HorovodTuneError) -> Exception:
    """Return ``error``, which Ray raised for an actor's method, with a text that begins with ``cause``."""
    from ray.exceptions import RayTaskError

    text = f"{type(cause).__module__}.{type(cause).__name__}: {cause}"
    if not isinstance(cause, TrainingFailed):  # a TrainingFailed already has the rank's traceback
        text += f"\n\nRaised in the trial's coordinator:\n{error}"

    class CauseFirst(RayTaskError):
        def __str__(self) -> str:
            return text

    first = CauseFirst("train", text, cause, proctitle="train", pid=1, ip="-")
    shown: Exception = first.as_instanceof_cause()
    return shown


@Patch(
    "the error of a metric that a report lacks is Ray's, which quotes the whole result",
    f"{_CONTROLLER}._validate_result_metrics(self, result) uses _metric TUNE_DISABLE_STRICT_METRIC_CHECKING",
    "ray.tune.experiment:Trial uses metric_analysis",
).once
def name_missing_metric(is_ours: Callable[[type], bool]) -> None:
    """Name the metrics that distributed trials report if a report lacks the requested one."""
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.result import AUTO_RESULT_KEYS

    unasked = {*AUTO_RESULT_KEYS, "done", "trial_id", "experiment_tag", "should_checkpoint"}
    unasked |= {"world_size", "hosts", "start_s"}

    @wrap(TuneController, "_validate_result_metrics")
    def validate(original: Any, self: Any, result: dict[str, Any]) -> None:
        try:
            original(self, result)
        except ValueError as error:
            # Several metrics of a searcher are written as a list.
            found = re.search(r"specified metric\(s\) `(.+?)` that `(.+?)` expects", str(error))
            trials = self.get_trials()
            if not found or not trials or not is_ours(trials[0].get_trainable_cls()):
                raise
            asked, by = found.groups()
            names = [name for name in result if name not in unasked and not name.startswith("config/")]
            reported = ", ".join(map(repr, names)) or "no metrics"
            asked = f"metric={asked if asked.startswith('[') else repr(asked)}"
            before = any(name in trial.metric_analysis for trial in trials for name in _names_in(found[1]))
            what = f"trials report {reported}; {asked} was requested (by {by})"
            if before:
                which = f"report {result.get('training_iteration')} of trial {result.get('trial_id')}"
                what = f"{which} lacks {asked} (of {by}), which other reports have; it has {reported}"
            raise MetricNotReported(
                f"{what}. Report it each time; if only some reports are to have it, set the environment "
                "variable TUNE_DISABLE_STRICT_METRIC_CHECKING=1 in the driver"
            ) from None


def _names_in(asked: str) -> list[str]:
    """Return the names in Tune's text for a metric, or for a list of several.

    >>> _names_in("valid/loss"), _names_in("['accuracy', 'latency_ms']")
    (['valid/loss'], ['accuracy', 'latency_ms'])
    """
    return re.findall(r"'(.+?)'", asked) if asked.startswith("[") else [asked]
