"""Patches Tune's controller: it does not save the trial of a function at its end, and saves any once only."""

from __future__ import annotations

import functools
import weakref
from dataclasses import replace
from typing import Any

from horovod_tune.compatibility import Patch, part

_MANAGER = "ray.train._internal.checkpoint_manager:_CheckpointManager"
_CONTROLLER = "ray.tune.execution.tune_controller:TuneController"
_PATCH = Patch(
    "saves at the end",
    "with background_uploads=True Tune is not told of a checkpoint that is on its way when its trial ends",
    (
        part(f"{_MANAGER}.checkpoint_config"),
        part(_MANAGER, uses="_checkpoint_config"),
        part("ray.tune.experiment.trial:Trial.should_checkpoint", "self", uses="checkpoint_at_end"),
        part(f"{_CONTROLLER}._on_saving_result", "self", "trial", "checkpoint_value"),
        part(
            f"{_CONTROLLER}._process_trial_save",
            "self",
            "trial",
            "checkpoint_value",
            uses="_cached_trial_decisions",
        ),
        part(f"{_CONTROLLER}._schedule_trial_save", "self", "trial", "result"),
    ),
)
_saved_at_end: weakref.WeakSet[Any] = weakref.WeakSet()


def save_at_end(trial: Any) -> None:
    """Let Tune save this trial when it ends or is stopped, and then or before a pause until it has all.

    A trainable that stores in the background has a checkpoint that has arrived and another one on its way.
    """
    if _PATCH.is_due:
        _save_until_nothing_is_left()
    if _PATCH.fits:
        manager = trial.run_metadata.checkpoint_manager
        # A copy: the user's own object may serve another search, which refuses this for functions.
        manager._checkpoint_config = replace(manager.checkpoint_config, checkpoint_at_end=True)
        _saved_at_end.add(trial)


def _save_until_nothing_is_left() -> None:
    from ray.tune.execution.tune_controller import TuneController

    original = TuneController._on_saving_result

    @functools.wraps(original)
    def on_saving_result(self: Any, trial: Any, checkpoint_value: Any) -> None:
        decision = self._cached_trial_decisions.get(trial.trial_id)
        if trial in _saved_at_end and checkpoint_value.checkpoint and decision in ("STOP", "PAUSE"):
            del self._cached_trial_decisions[trial.trial_id]
            self._process_trial_save(trial, checkpoint_value)
            self._cached_trial_decisions[trial.trial_id] = decision
            self._schedule_trial_save(trial)
        else:
            original(self, trial, checkpoint_value)

    TuneController._on_saving_result = on_saving_result  # type: ignore[method-assign]
