"""Tune's ASHA and a searcher of Tune's, as `lcbench_clock.py` drives them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from lcbench import EPOCHS, space
from lcbench_clock import Config, Decision, Report
from ray.tune.schedulers import ASHAScheduler, TrialScheduler
from ray.tune.search import Searcher


class TuneSearch:
    """A searcher under Tune's ASHA: grace period 2, reduction factor 3, 52 epochs."""

    def __init__(self, searcher: Searcher) -> None:
        if not searcher.set_search_properties("loss", "min", space()):
            raise RuntimeError("the searcher refused the space")
        self._searcher = searcher
        self._scheduler: Any = ASHAScheduler(  # without Tune's controller, which it does not look at
            time_attr="training_iteration",
            metric="loss",
            mode="min",
            grace_period=2,
            reduction_factor=3,
            max_t=EPOCHS,
        )
        self._trials: dict[Any, Any] = {}
        self._identities = (f"t{number}" for number in itertools.count())

    def suggest(self) -> tuple[str, Config]:
        identity = next(self._identities)
        config = self._searcher.suggest(identity)
        if config is None:
            raise RuntimeError("the searcher suggested nothing")
        self._trials[identity] = SimpleNamespace(trial_id=identity)
        self._scheduler.on_trial_add(None, self._trials[identity])
        return identity, config

    def report(self, report: Report) -> Decision:
        trial = self._trials[report.trial]
        result = {
            "loss": report.error,
            "training_iteration": report.epoch,
            "time_total_s": report.seconds,
        }
        decision = self._scheduler.on_trial_result(None, trial, result)
        if decision == TrialScheduler.STOP or report.epoch == EPOCHS:
            # As Tune does: the last result comes with the end of the trial alone.
            self._scheduler.on_trial_complete(None, trial, result)
            self._searcher.on_trial_complete(trial.trial_id, result | {"done": True})
            return Decision.STOP
        self._searcher.on_trial_result(trial.trial_id, result)
        return Decision.CONTINUE
