"""The simulated clock under which `search_lcbench.py` compares searches: it needs neither Ray nor peers.

A search controls a few workers through two calls, `suggest` and `report`, which an adapter passes on to
Tune's classes or to a peer's. An epoch takes as long as in the task, a decision takes no time.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np

#: Regret is measured after as many epochs as this many whole trainings have.
TRAININGS = (5, 10, 20)
Config = dict[str, Any]


class Decision(Enum):
    CONTINUE = "continue"
    STOP = "stop"
    PAUSE = "pause"


@dataclass(frozen=True)
class Report:
    """The error of a trial after an epoch; ``seconds`` is its total training time."""

    trial: Hashable
    epoch: int
    error: float
    seconds: float


class Search(Protocol):
    def suggest(self) -> tuple[Hashable, Config] | None:
        """Return the trial to train next, or None if nothing can start before another report.

        A paused trial continues from the epoch where it was paused, with the configuration it began with.
        """

    def report(self, report: Report) -> Decision:
        """Record an error and return how the trial continues; after the last epoch it ends in any case."""


class Curves(Protocol):
    @property
    def best_error(self) -> float: ...

    def curve(self, config: Config) -> tuple[np.ndarray, float]:
        """Return the error after each epoch, shape (epochs,), and the seconds that an epoch takes."""


@dataclass
class _Trial:
    identity: Hashable
    number: int
    errors: np.ndarray
    seconds: float
    epochs_done: int = 0


@dataclass
class Outcome:
    """``regrets`` has a value per budget, ``suggestion_seconds`` a CPU time per trial."""

    regrets: list[float] = field(default_factory=list)
    trials: int = 0
    suggestion_seconds: list[float] = field(default_factory=list)


def simulate(
    task: Curves, search: Search, *, workers: int, epochs: int, trainings: Sequence[int] = TRAININGS
) -> Outcome:
    """Run a search until ``epochs`` times the last of ``trainings`` are used up.

    Each epoch that a worker trains counts once. Regret is the smallest error reported so far, at any epoch,
    less the smallest error of the task.

    Raises:
        RuntimeError: The search suggests nothing though no trial is running, or a trial that is not paused.
    """
    outcome = Outcome()
    known: dict[Hashable, _Trial] = {}
    paused: set[Hashable] = set()
    running: list[tuple[float, int, _Trial]] = []
    clock, used, best = 0.0, 0, float("inf")
    while len(outcome.regrets) < len(trainings):
        while len(running) < workers:
            before = time.process_time()
            suggestion = search.suggest()
            took = time.process_time() - before
            if suggestion is None:
                break
            identity, config = suggestion
            if identity not in known:
                known[identity] = _Trial(identity, len(known), *task.curve(config))
                outcome.suggestion_seconds.append(took)
            elif identity not in paused:
                raise RuntimeError(f"trial {identity} cannot be resumed: it is not paused")
            trial = known[identity]
            paused.discard(identity)
            heapq.heappush(running, (clock + trial.seconds, trial.number, trial))
        if not running:
            raise RuntimeError("the search suggests nothing, and no trial is running")
        clock, _, trial = heapq.heappop(running)
        trial.epochs_done += 1
        used += 1
        error = float(trial.errors[trial.epochs_done - 1])
        best = min(best, error)
        if used in [epochs * n for n in trainings]:
            outcome.regrets.append(best - task.best_error)
        trained_s = trial.epochs_done * trial.seconds
        decision = search.report(Report(trial.identity, trial.epochs_done, error, trained_s))
        if trial.epochs_done == epochs or decision is Decision.STOP:
            continue
        if decision is Decision.PAUSE:
            paused.add(trial.identity)
        else:
            heapq.heappush(running, (clock + trial.seconds, trial.number, trial))
    outcome.trials = len(known)
    return outcome
