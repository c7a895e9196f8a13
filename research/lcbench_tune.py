"""The adapter of Tune's searchers and schedulers to `lcbench_clock.py`."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

from lcbench import EPOCHS, space
from lcbench_clock import Config, Decision, Report
from ray.tune.schedulers import ASHAScheduler, TrialScheduler
from ray.tune.search import Searcher

from horovod_tune.search import PromotingASHA


class TuneSearch:
    """A searcher under an ASHA with grace period 2 and reduction factor 3: Tune's, or ours.

    The space and the epochs are LCBench's, unless others are given.
    """

    def __init__(
        self,
        searcher: Searcher,
        scheduler: type[ASHAScheduler] | type[PromotingASHA] = ASHAScheduler,
        own_space: Config | None = None,
        epochs: int = EPOCHS,
    ) -> None:
        if not searcher.set_search_properties("loss", "min", own_space or space()):
            raise RuntimeError("the searcher refused the space")
        self._searcher, self._epochs = searcher, epochs
        self._scheduler: Any = scheduler(
            time_attr="training_iteration",
            metric="loss",
            mode="min",
            grace_period=2,
            reduction_factor=3,
            max_t=epochs,
        )
        self._trials: dict[Any, Any] = {}
        # The part of Tune's controller that schedulers use.
        self._controller = SimpleNamespace(
            search_alg=SimpleNamespace(is_finished=lambda: False), get_trials=lambda: self._trials.values()
        )
        self._identities = (f"t{number}" for number in itertools.count())

    def suggest(self) -> tuple[str, Config]:
        paused = self._scheduler.choose_trial_to_run(self._controller)
        if paused is not None:
            paused.status = "RUNNING"
            return paused.trial_id, {}
        identity = next(self._identities)
        config = self._searcher.suggest(identity)
        if config is None:
            raise RuntimeError("the searcher suggested nothing")
        self._trials[identity] = SimpleNamespace(
            trial_id=identity, status="RUNNING", checkpoint="saved", last_result={}
        )
        self._scheduler.on_trial_add(self._controller, self._trials[identity])
        return identity, config

    def report(self, report: Report) -> Decision:
        trial = self._trials[report.trial]
        result = {
            "loss": report.error,
            "training_iteration": report.epoch,
            "time_total_s": report.seconds,
        }
        decision = self._scheduler.on_trial_result(self._controller, trial, result)
        if decision == TrialScheduler.STOP or report.epoch == self._epochs:
            # As in Tune, the searcher receives the last result only in `on_trial_complete`.
            self._scheduler.on_trial_complete(self._controller, trial, result)
            self._searcher.on_trial_complete(trial.trial_id, result | {"done": True})
            trial.status = "TERMINATED"
            return Decision.STOP
        self._searcher.on_trial_result(trial.trial_id, result)
        if decision == TrialScheduler.PAUSE:
            trial.status = "PAUSED"
            return Decision.PAUSE
        return Decision.CONTINUE
