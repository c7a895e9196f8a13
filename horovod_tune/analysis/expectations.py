"""Trials that were not trained to the end: how the search expects them to go on, and where they stand."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from horovod_tune.analysis.reader.records import PredictedCurve, TrialRecord
from horovod_tune.analysis.reader.tune_fields import iteration_of
from horovod_tune.analysis.results import Analysis
from horovod_tune.analysis.scoring import value_of
from horovod_tune.analysis.series import rungs

_ITERATION = "training_iteration"


@dataclass(frozen=True)
class Expectation:
    """A trial's metric from its last report on, as the search's model has it; arrays of one length.

    About 80 of 100 reports are between `low` and `high`.
    """

    iterations: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray

    @property
    def text(self) -> str:
        """The expected end, for example `0.912 (0.90 to 0.93) at iteration 52`."""
        middle, low, high = (f"{axis[-1]:.4g}" for axis in (self.middle, self.low, self.high))
        return f"{middle} ({low} to {high}) at iteration {self.iterations[-1]:.0f}"


def expectations(analysis: Analysis) -> dict[int, Expectation]:
    """Return what is expected of trials that have neither failed nor been trained to the end, by number.

    Empty where the search had no model of learning curves, or one of another metric.
    """
    predictions = analysis.record.predictions
    if predictions is None or predictions.metric != analysis.metric:
        return {}
    found = {}
    for number, trial in enumerate(analysis.trials):
        curve = predictions.curves.get(trial.trial_id)
        if curve is None or trial.status == "ERROR":
            continue
        expected = _from_last_report(trial, curve, predictions.time_attr)
        if expected is not None:
            found[number] = expected
    return found


def _from_last_report(trial: TrialRecord, curve: PredictedCurve, time_attr: str) -> Expectation | None:
    """Return the part of a predicted curve that the trial has not come to since, over iterations."""
    last = trial.rows[-1] if trial.rows else trial.last_result or {}
    iteration = iteration_of(last)
    time = float(iteration) if time_attr == _ITERATION and iteration else value_of(last, time_attr)
    if iteration is None or time is None or not 0 < time < curve.times[-1]:
        return None
    times = np.asarray(curve.times)
    ahead = np.concatenate([[time], times[times > time]])
    # Where the time is another one than the iteration, it goes on as it has.
    iterations = iteration + (ahead - time) * (iteration / time)
    axes = (np.interp(ahead, times, axis) for axis in (curve.middle, curve.low, curve.high))
    return Expectation(iterations, *axes)


@dataclass(frozen=True)
class Standing:
    """Where a trial stands that a scheduler has paused or stopped at a rung: `place` 1 is the best."""

    iteration: int
    place: int
    of: int
    waits: bool

    @property
    def text(self) -> str:
        word = "waits" if self.waits else "was stopped"
        return f"{word} at iteration {self.iteration}: number {self.place} of {self.of} that came as far"


def standings(analysis: Analysis) -> dict[int, Standing]:
    """Return where those trials stand that were paused or stopped at a rung of the scheduler, by number.

    The places are among all trials that have come to the rung, the later ones too. Empty where the
    experiment does not say its rungs.
    """
    if not analysis.record.rungs:
        return {}
    _, mode = analysis.require_metric()
    sign = 1.0 if mode == "min" else -1.0
    found = {}
    for rung in rungs(analysis):
        ranked = sorted(sign * value for value in rung.values if math.isfinite(value))
        for trial, value in zip(rung.trials, rung.values, strict=True):
            record = analysis.trials[trial]
            reached = iteration_of(record.last_result or {})
            if reached != rung.iteration or record.status not in ("PAUSED", "TERMINATED"):
                continue
            if math.isfinite(value):
                place = ranked.index(sign * value) + 1
                found[trial] = Standing(rung.iteration, place, len(rung.trials), record.status == "PAUSED")
    return found
