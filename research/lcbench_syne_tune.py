"""The adapter of Syne Tune's schedulers to `lcbench_clock.py`; it calls them as Syne Tune's own tuner does.

    pip install 'syne-tune[gpsearchers]==0.13.0' 'numpy<2' 'pandas<3' 'scipy<1.14' statsmodels onnxruntime

Needs an environment of its own (Python 3.11); Ray need not be there.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from lcbench import EPOCHS, LOGARITHMIC
from lcbench_clock import Config, Decision, Report
from syne_tune.backend.trial_status import Trial
from syne_tune.config_space import lograndint, loguniform, randint, uniform
from syne_tune.optimizer.baselines import ASHA, BOHB, MOBSTER, HyperTune
from syne_tune.optimizer.scheduler import SchedulerDecision

# The schedulers that are compared, with the arguments that differ from Syne Tune's defaults.
# `promotion` pauses trials where the default stops them; the rungs allow at most four brackets. `warped`
# warps the axes, as `weight_decay` is not on a log scale in LCBench's own search space.
_SCHEDULERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "mobster": (MOBSTER, {}),
    "mobster_promotion": (MOBSTER, {"type": "promotion"}),
    "mobster_warped": (MOBSTER, {"search_options": {"input_warping": True}}),
    "hyper_tune": (HyperTune, {}),
    "hyper_tune_promotion": (HyperTune, {"type": "promotion", "brackets": 4}),
    "syne_tune_asha": (ASHA, {}),
    "syne_tune_bohb": (BOHB, {}),
}


def space() -> dict[str, Any]:
    """Return the search space of LCBench as Syne Tune's domains, whose upper bounds are inclusive."""
    decay = loguniform if "weight_decay" in LOGARITHMIC else uniform
    return {
        "batch_size": lograndint(16, 512),
        "learning_rate": loguniform(1e-4, 0.1),
        "momentum": uniform(0.1, 0.99),
        "weight_decay": decay(1e-5, 0.1),
        "num_layers": randint(1, 5),
        "max_units": lograndint(64, 1024),
        "max_dropout": uniform(0.0, 1.0),
    }


class SyneTuneSearch:
    """One of Syne Tune's baselines: grace period 2, reduction factor 3, 52 epochs."""

    def __init__(self, method: str, seed: int) -> None:
        scheduler, arguments = _SCHEDULERS[method]
        search_options = {"debug_log": False} | arguments.get("search_options", {})
        self._scheduler = scheduler(
            space() | {"epochs": EPOCHS},
            metric="loss",
            mode="min",
            resource_attr="epoch",
            max_resource_attr="epochs",
            grace_period=2,
            reduction_factor=3,
            random_seed=seed,
            **arguments | {"search_options": search_options},
        )
        self._trials: dict[Any, Trial] = {}

    def suggest(self) -> tuple[int, Config] | None:
        suggestion = self._scheduler.suggest(len(self._trials))
        if suggestion is None:
            return None
        if suggestion.spawn_new_trial_id:
            trial = Trial(len(self._trials), suggestion.config, datetime.now())
            self._trials[trial.trial_id] = trial
            self._scheduler.on_trial_add(trial)
        else:
            trial = self._trials[suggestion.checkpoint_trial_id]
            if suggestion.config is not None:
                trial.config = suggestion.config
        return trial.trial_id, trial.config

    def report(self, report: Report) -> Decision:
        trial = self._trials[report.trial]
        result = {"loss": report.error, "epoch": report.epoch, "elapsed_time": report.seconds}
        decision = self._scheduler.on_trial_result(trial, result)
        if decision == SchedulerDecision.CONTINUE:
            return Decision.CONTINUE
        self._scheduler.on_trial_remove(trial)
        return Decision.PAUSE if decision == SchedulerDecision.PAUSE else Decision.STOP
