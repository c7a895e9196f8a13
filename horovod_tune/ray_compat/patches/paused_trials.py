"""Patches bugs in how Tune continues and ends paused trials; they occur with any trainable."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from horovod_tune.compatibility import Patch, wrap

_CONTROLLER = "ray.tune.execution.tune_controller:TuneController"
_HYPERBAND = "ray.tune.schedulers:HyperBandScheduler"
_PBT = "ray.tune.schedulers:PopulationBasedTraining"


def mend_paused_trials() -> None:
    """Apply all of these patches, once per process."""
    _record_pauses_and_stops()
    _keep_longer_results()
    _leave_ended_trials_out_of_brackets()
    _process_waiting_brackets()
    _perturb_waiting_populations()


@Patch(
    "PopulationBasedTraining(synch=True) may wait forever for a trial that was paused while it was saved, "
    "and a trial that is stopped while it is paused continues after a restore",
    f"{_CONTROLLER} uses _cached_trial_decisions",
    f"{_CONTROLLER}.pause_trial(self, trial, should_checkpoint) uses _schedule_trial_pause",
    f"{_CONTROLLER}.stop_trial(self, trial)",
    f"{_CONTROLLER}._mark_trial_to_checkpoint(self, trial)",
).once
def _record_pauses_and_stops() -> None:
    """Let a trial continue if it was paused while being saved, and save the state of a stopped paused trial.

    If a weak trial is paused by the last report of the others while it is being saved, Tune records that it
    must stop after the save, but drops the save: the record stops the trial at its next checkpoint, in 3 of
    70 searches with short steps on a busy machine. Tune saves only the states of trials that it has marked,
    and does not mark a trial that is stopped while it has no actor.
    """
    from ray.tune.execution.tune_controller import TuneController

    @wrap(TuneController, "pause_trial")
    def pause(original: Any, self: Any, trial: Any, should_checkpoint: bool = True) -> None:
        original(self, trial, should_checkpoint)
        if not should_checkpoint and trial.status == "PAUSED":
            self._cached_trial_decisions.pop(trial.trial_id, None)

    @wrap(TuneController, "stop_trial")
    def stop(original: Any, self: Any, trial: Any) -> None:
        original(self, trial)
        self._mark_trial_to_checkpoint(trial)


@Patch(
    "a trial that starts or continues may lose results that were not yet copied to the storage",
    "ray.tune.logger:LoggerCallback._restore_from_remote(self, file_name, trial) uses "
    "local_path storage trial_fs_path storage_filesystem",
).once
def _keep_longer_results() -> None:
    """Stop Tune from replacing a trial's local result file with a copy that is not longer.

    When a trial continues or starts again, Tune's loggers overwrite the file with the copy in the storage. If
    this driver wrote the file, the copy lacks what has not been synced yet.
    """
    from ray.tune.logger import LoggerCallback

    @wrap(LoggerCallback, "_restore_from_remote")
    def restore(original: Any, self: Any, file_name: str, trial: Any) -> None:
        local = Path(trial.local_path, file_name)
        path = Path(trial.storage.trial_fs_path, file_name).as_posix()
        stored = trial.storage.storage_filesystem.get_file_info(path)
        if not local.exists() or local.stat().st_size < (stored.size or 0):
            original(self, file_name, trial)


def _when_all_wait(scheduler_class: Any, wake: Callable[[Any, Any], None]) -> None:
    """Call ``wake(scheduler, controller)`` if trials are paused, and no other trial can report."""

    @wrap(scheduler_class, "choose_trial_to_run")
    def choose(original: Any, self: Any, tune_controller: Any) -> Any:
        chosen = original(self, tune_controller)
        statuses = {trial.status for trial in tune_controller.get_trials()}
        if chosen is not None or "PAUSED" not in statuses or statuses & {"PENDING", "RUNNING"}:
            return chosen
        wake(self, tune_controller)
        return original(self, tune_controller)


@Patch(
    "HyperBandScheduler and HyperBandForBOHB wait forever after a restore if some trials have ended",
    f"{_HYPERBAND}.on_trial_add(self, tune_controller, trial)",
    "ray.tune.schedulers:HyperBandForBOHB.on_trial_add(self, tune_controller, trial)",
).once
def _leave_ended_trials_out_of_brackets() -> None:
    """Keep trials that had ended before a restore out of the brackets, which would wait for their reports."""
    from ray.tune.schedulers import HyperBandForBOHB, HyperBandScheduler

    for scheduler in (HyperBandScheduler, HyperBandForBOHB):

        @wrap(scheduler, "on_trial_add")
        def add(original: Any, self: Any, tune_controller: Any, trial: Any) -> None:
            if not trial.is_finished():
                original(self, tune_controller, trial)


@Patch(
    "HyperBandScheduler may wait forever after a trial that failed last in its bracket",
    f"{_HYPERBAND}.choose_trial_to_run(self, tune_controller) uses _hyperbands",
    f"{_HYPERBAND}._process_bracket(self, tune_controller, bracket)",
    "ray.tune.schedulers.hyperband:_Bracket uses current_trials continue_trial trials_to_unpause",
).once
def _process_waiting_brackets() -> None:
    """Make HyperBandScheduler check its brackets again when no trial is left to report.

    When a trial's report finishes a bracket, HyperBandScheduler stops the paused trials of the bracket, but
    misses a trial that is still being saved before its pause. It does not check a bracket whose last trial
    fails, and does not continue a trial that ResourceChangingScheduler pauses before its milestone.
    HyperBandForBOHB checks again by itself.
    """
    from ray.tune.schedulers import HyperBandScheduler

    def wake(scheduler: Any, controller: Any) -> None:
        for bracket in [bracket for band in scheduler._hyperbands for bracket in band]:
            if bracket is not None and bracket.current_trials():
                scheduler._process_bracket(controller, bracket)
                waiting = [trial for trial in bracket.current_trials() if trial.status == "PAUSED"]
                bracket.trials_to_unpause.update(filter(bracket.continue_trial, waiting))

    _when_all_wait(HyperBandScheduler, wake)


@Patch(
    "PopulationBasedTraining(synch=True) may wait forever for a trial that failed or ended early",
    f"{_PBT}.choose_trial_to_run(self, tune_controller)",
    f"{_PBT}.on_trial_result(self, tune_controller, trial, result)",
    f"{_PBT} uses _synch _trial_state _time_attr last_result get_live_trials",
).once
def _perturb_waiting_populations() -> None:
    """Make PopulationBasedTraining(synch=True), and PB2, continue without trials that failed or ended early.

    It perturbs when the last trial of the population reports. A trial that ends before the others' next
    perturbation never reports again, and a trial that failed counts as alive.
    """
    from ray.tune.schedulers import PopulationBasedTraining

    def wake(scheduler: Any, controller: Any) -> None:
        if scheduler._synch:
            alive, states = controller.get_live_trials(), scheduler._trial_state
            alive.difference_update([trial for trial in alive if trial.is_finished()])
            last = max(alive, key=lambda trial: states[trial].last_result[scheduler._time_attr])
            # Act as if the trial that got furthest reported again: it is now the last of the population.
            scheduler.on_trial_result(controller, last, states[last].last_result)

    _when_all_wait(PopulationBasedTraining, wake)
