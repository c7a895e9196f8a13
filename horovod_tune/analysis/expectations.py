"""Trials that were not trained to the end: their expected continuation, and their rank at a rung."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from horovod_tune.analysis.reader.plain_values import iteration_of
from horovod_tune.analysis.reader.records import TRAINING_ITERATION, PredictedCurve, TrialRecord
from horovod_tune.analysis.results import Analysis, cached
from horovod_tune.analysis.scoring import value_of


@dataclass(frozen=True)
class Expectation:
    """A trial's metric from its last report on, as the search's model has it; arrays of one length.

    About 80 of 100 reports are between `low` and `high`. The last entries are the values expected at `end`, a
    time in the search's `time_attr`; `iterations` are the corresponding iterations.
    """

    iterations: np.ndarray
    middle: np.ndarray
    low: np.ndarray
    high: np.ndarray
    end: float
    time_attr: str = TRAINING_ITERATION


def time_in_words(time_attr: str, time: float) -> str:
    """Return a time as words.

    >>> time_in_words("training_iteration", 52), time_in_words("epoch", 3), time_in_words("samples", 5e4)
    ('at iteration 52', 'at epoch 3', 'at samples 50000')
    """
    return f"at {'iteration' if time_attr == TRAINING_ITERATION else time_attr} {time:.6g}"


@cached
def expectations(analysis: Analysis) -> dict[int, Expectation]:
    """Return what is expected of trials that have neither failed nor been trained to the end, by number.

    Empty if the search had no model of learning curves, or one of another metric.
    """
    predictions = analysis.record.predictions
    if predictions is None or predictions.metric != analysis.metric:
        return {}
    found = {}
    for number, trial in enumerate(analysis.trials):
        curve = predictions.curves.get(trial.trial_id)
        expected = _from_last_report(trial, curve, predictions.time_attr) if curve is not None else None
        if expected is not None and trial.status != "ERROR":
            found[number] = expected
    return found


def _from_last_report(trial: TrialRecord, curve: PredictedCurve, time_attr: str) -> Expectation | None:
    """Return the part of a predicted curve after the trial's last report, over iterations."""
    last = trial.rows[-1] if trial.rows else trial.last_result or {}
    iteration, time = iteration_of(last), _time_of(last, time_attr)
    if iteration is None or time is None or not 0 < time < curve.times[-1]:
        return None
    times = np.asarray(curve.times)
    ahead = np.concatenate([[time], times[times > time]])
    # If the time is not the iteration, it is extrapolated from its rate since the first report.
    first = trial.rows[0] if trial.rows else last
    begun_at, begun = iteration_of(first), _time_of(first, time_attr)
    pace = iteration / time
    if begun_at is not None and begun is not None and begun_at < iteration and begun < time:
        pace = (iteration - begun_at) / (time - begun)
    iterations = iteration + (ahead - time) * pace
    middle, low, high = (np.interp(ahead, times, axis) for axis in (curve.middle, curve.low, curve.high))
    return Expectation(iterations, middle, low, high, curve.times[-1], time_attr)


def _time_of(row: Mapping[str, Any], time_attr: str) -> float | None:
    iteration = iteration_of(row) if time_attr == TRAINING_ITERATION else None
    return value_of(row, time_attr) if iteration is None else float(iteration)


@dataclass(frozen=True)
class RungPlace:
    """A trial's rank among all that reached its last rung (1 is the best).

    `time` is that of its last report, in what the scheduler calls `time_attr`.
    """

    time: float
    place: int
    of: int

    @property
    def text(self) -> str:
        return f"{self.place} of {self.of} at {self.time:.6g}"


@cached
def standings(analysis: Analysis) -> dict[int, RungPlace]:
    """Return the rank of trials that were paused or stopped at a rung of the scheduler, by number.

    The ranks are among all trials that reached the rung, including later ones. Empty if the experiment
    has no record of its rungs.
    """
    known = analysis.record.rung_times
    if known is None:
        return {}
    metric, mode = analysis.require_metric()
    sign = 1.0 if mode == "min" else -1.0
    reports = []
    for trial in analysis.trials:
        timed = [(_time_of(row, known.time_attr), value_of(row, metric)) for row in trial.rows]
        reports.append([(time, value) for time, value in timed if time is not None])
    found = {}
    for rung, following in zip(known.times, [*known.times[1:], math.inf], strict=True):
        there: dict[int, float] = {}
        stands: dict[int, float] = {}
        for number, rows in enumerate(reports):
            beyond = [(time, value) for time, value in rows if time >= rung]
            if not beyond:
                continue
            time, value = beyond[0]
            there[number] = math.nan if value is None else sign * value
            is_over = analysis.trials[number].status in ("PAUSED", "TERMINATED")
            # Its progress is that of the report at the rung, even if it reported that twice.
            rests = is_over and max(each for each, _ in beyond) == time < following
            if rests and math.isfinite(there[number]):
                stands[number] = time
        ranked = sorted(value for value in there.values() if math.isfinite(value))
        for number, time in stands.items():
            place = bisect.bisect_left(ranked, there[number]) + 1
            found[number] = RungPlace(time, place, len(there))
    return found
