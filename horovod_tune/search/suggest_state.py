"""What a suggestion is made from: the trials that count, what is looked for and what may go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from bayes_opt.acquisition import AcquisitionFunction
from numpy.typing import NDArray

from horovod_tune.search.gp.earlier_task import EarlierTask
from horovod_tune.search.gp.failure_model import diverged
from horovod_tune.search.gp.feasibility import Feasibility
from horovod_tune.search.history import Ending, History, Trial
from horovod_tune.search.objectives import Objectives
from horovod_tune.search.space.dimensions import FloatArray
from horovod_tune.search.space.search_space import SearchSpace


@dataclass(frozen=True)
class SuggestState:
    """What a suggestion is made from: the trials that count, what is looked for and what may go wrong."""

    space: SearchSpace
    usable: list[Trial]
    objectives: Objectives
    #: The probability that a trial neither fails nor breaks a limit; None if all are expected to.
    feasibility: Feasibility | None
    #: The probability that a trial breaks no limit; None without limits, and while too little is known.
    within_limits: Feasibility | None
    acquisition: AcquisitionFunction
    draws: int
    #: The earlier experiment's model, weighed against the new results.
    earlier: EarlierTask | None = None

    def scores(self, trials: Sequence[Trial], metric: str) -> FloatArray:
        """Return the values of a metric, larger being better, shape (trials,)."""
        return np.asarray([self.objectives.score(trial, metric) for trial in trials], dtype=float)

    def allowed(self, trials: Sequence[Trial], pending: FloatArray) -> NDArray[np.bool_] | None:
        """Return which of these trials, and of the points in flight, keep the limits; None without limits.

        A point in flight does if that is more probable than not.
        """
        if self.within_limits is None:
            return None
        results = np.asarray([self.objectives.keeps_limits(trial) for trial in trials], dtype=bool)
        in_flight = self.within_limits.log_probability(pending) > np.log(0.5) if len(pending) else results[:0]
        found = np.concatenate([results, in_flight])
        # With more results than a model takes, those that keep the limits may all be left out.
        return found if found.any() else None

    def within_first(self, trials: Sequence[Trial], scores: FloatArray) -> FloatArray:
        """Return `scores` with those that break a limit far behind all others."""
        if self.within_limits is None:
            return scores
        allowed = np.asarray([self.objectives.keeps_limits(trial) for trial in trials], dtype=bool)
        return np.where(allowed, scores, scores - 1e3 * (np.ptp(scores) + 1.0))


def features_of(space: SearchSpace, trials: Sequence[Trial]) -> FloatArray:
    points = [trial.point for trial in trials]
    return space.features(np.asarray(points, dtype=float).reshape(len(points), space.dimension))


def running(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.ending is Ending.RUNNING]


def split_failed(history: History, objectives: Objectives) -> tuple[list[Trial], list[Trial]]:
    """Return the trials with usable metrics, and those that failed or diverged."""
    failed = history.with_ending(Ending.FAILED)
    others = [trial for trial in history.trials.values() if trial.ending is not Ending.FAILED]
    lost: set[int] = set()
    for metric in objectives.metrics:
        scores = [objectives.score(trial, metric) for trial in others]
        known = [i for i, gain in enumerate(scores) if gain is not None and np.isfinite(gain)]
        beyond = diverged(-np.asarray([scores[i] for i in known], dtype=float))
        lost |= {known[i] for i in np.flatnonzero(beyond)}
    usable = [trial for i, trial in enumerate(others) if i not in lost]
    return usable, failed + [others[i] for i in sorted(lost)]
