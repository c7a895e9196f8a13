"""Learning curves as the model's data: one row per trial and time, with times on a logarithmic axis.

The last report of each doubling of the time is kept: a model of a few hundred rows then has room for many
trials, and neighbouring epochs carry nearly the same information.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from horovod_tune.search.gp.kernels import FloatArray
from horovod_tune.search.history import Ending, Trial

#: Times in this ratio are at distance 1 for the model.
_RATIO = 50.0
#: How curves continue from a time is known once this many trials have been trained for longer.
_KNOWN = 3


@dataclass(frozen=True)
class CurveRows:
    """What trials reported: `trials` are indices, `times` on the model's axis, `values` as reported.

    `target` is the time that all trials are compared at, on the model's axis.
    """

    trials: list[int]
    times: FloatArray
    values: FloatArray
    target: float


def is_unfinished(trial: Trial, target: float) -> bool:
    """Return True if a trial has reported, but not up to `target` on the model's axis."""
    last = max(trial.curve, default=0.0)
    return last > 0 and axis(last) < target - 1e-9


def trials_with_open_end(trials: list[Trial], target: float, mode: str) -> list[Trial]:
    """Return the trials short of `target` of whose curves it is unknown whether they get worse later.

    Fewer than three other trials have trained for longer, and none of them has got worse since then.

    >>> trials = [Trial(str(end), (), curve={1.0: 0.5, end: 0.4}) for end in (2.0, 3.0, 4.0, 5.0, 52.0)]
    >>> [trial.trial_id for trial in trials_with_open_end(trials, axis(52.0), "min")]
    ['4.0', '5.0']
    >>> trials_with_open_end(trials, axis(52.0), "max")
    []
    """
    last = [max(trial.curve, default=math.inf) for trial in trials]

    def is_open(time: float) -> bool:
        further = [trial for trial, other in zip(trials, last, strict=True) if other > time]
        return len(further) < _KNOWN and not any(_worsens(trial.curve, time, mode) for trial in further)

    ahead = {
        time for time in set(last) if 0 < time < math.inf and axis(time) < target - 1e-9 and is_open(time)
    }
    return [trial for trial, time in zip(trials, last, strict=True) if time in ahead]


def _worsens(curve: Mapping[float, float], since: float, mode: str) -> bool:
    """Return True if a curve ends worse than it was at `since` (or in its first report, if that is later)."""
    if not curve:
        return False
    times = sorted(curve)
    before = [time for time in times if time <= since]
    change = curve[times[-1]] - curve[before[-1] if before else times[0]]
    return change > 0 if mode == "min" else change < 0


def rows_of(trials: list[Trial], horizon: float | None) -> CurveRows:
    """Return the rows of `trials`; their target is the later of `horizon` and the latest report."""
    rows: list[tuple[int, float, float]] = []
    for index, trial in enumerate(trials):
        curve = trial.curve
        if not curve and trial.ending is Ending.SCORED and trial.value is not None:
            # A result without a time, such as one from elsewhere, counts as that of a whole training.
            curve = {math.inf: trial.value}
        rows += [(index, time, curve[time]) for time in kept_times(curve)]
    latest = max([time for _, time, _ in rows if math.isfinite(time)], default=1.0)
    end = max(horizon or 0.0, latest)
    at = np.asarray([axis(min(time, end)) for _, time, _ in rows])
    return CurveRows([row[0] for row in rows], at, np.asarray([row[2] for row in rows]), axis(end))


def axis(time: float) -> float:
    """Return a time's coordinate in the model."""
    return math.log(max(time, 1e-9)) / math.log(_RATIO)


def kept_times(curve: Iterable[float]) -> list[float]:
    """Return the times of a curve that are kept, in order: the last time in each doubling of the time.

    >>> kept_times([1, 2, 3, 4, 5, 6, 7, 8, 9])
    [1, 3, 7, 9]
    """
    last: dict[int, float] = {}
    for time in sorted(curve):
        if math.isinf(time) or time <= 0:
            last[2**30 if time > 0 else -(2**30)] = time
        else:
            last[math.floor(math.log2(time) + 1e-9)] = time
    return list(last.values())
