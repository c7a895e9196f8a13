"""`analyze`: what a search found, as attributes and pandas frames."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import pandas as pd

from horovod_tune.analysis import frames
from horovod_tune.analysis.reader.folders import Folder, open_folder
from horovod_tune.analysis.reader.records import ExperimentRecord, Problem, TrialRecord
from horovod_tune.analysis.reader.tune_fields import TUNES_OWN
from horovod_tune.analysis.reader.tune_files import folder_of, metric_of, read_experiment
from horovod_tune.analysis.reader.tune_pickles import checkpoints_of
from horovod_tune.analysis.scoring import SCOPES, Score, best_index, is_better, score, value_of
from horovod_tune.analysis.trial_facts import config_changes, plain_text

_QUIET_S = 660.0  # Tune copies to its storage every 300 s; two of these without a sign is an end


def analyze(
    experiment: Any,
    *,
    metric: str | None = None,
    mode: str | None = None,
    scope: str = "last",
    filesystem: Any = None,
) -> Analysis:
    """Read a Tune experiment: finished, interrupted or still running.

    `experiment` is what `tune.run` or `Tuner.fit` returned, or the experiment's folder as a local path or any
    URI that Tune's storage takes; `filesystem` is the pyarrow filesystem of a path that needs one (as in
    `RunConfig(storage_filesystem=…)`). Metric and mode ("min", "max") are the experiment's own unless given.
    `scope` says how trials are compared: by their "last" value, as Tune does, or by the best of "all".

    Raises `TypeError` for anything else, `FileNotFoundError` where there is no such folder, and `ValueError`
    where it holds no experiment or an argument is none of what it may be.
    """
    if mode not in (None, "min", "max"):
        raise ValueError(f'mode must be "min" or "max", got {mode!r}')
    if scope not in SCOPES:
        raise ValueError(f'scope must be "last" or "all", got {scope!r}')
    known: tuple[str | None, str | None] = (None, None)
    folder: Folder | None
    if isinstance(experiment, Analysis):
        return Analysis(experiment.record, experiment.folder, metric=metric, mode=mode, scope=scope)
    if isinstance(experiment, (str, os.PathLike)):
        folder = open_folder(experiment, filesystem)
    else:
        folder = folder_of(experiment)
        known = metric_of(experiment)
        if folder is None:
            raise TypeError(
                "experiment must be a path, or what tune.run or Tuner.fit returned; "
                f"got {type(experiment).__name__}"
            )
    record = read_experiment(folder)
    metric_known, mode_known = known[0] or record.metric, known[1] or record.mode
    if metric is None:
        metric, mode = metric_known, mode or mode_known
    elif mode is None and metric == metric_known:
        mode = mode_known
    return Analysis(record, folder, metric=metric, mode=mode, scope=scope)


class Analysis:
    """A read experiment. Nothing is read again: `reload()` returns a new one of a running experiment.

    `metric`, `mode` and `scope` are what trials are compared by, `problems` what could not be read,
    `record` everything as it was read.
    """

    def __init__(
        self,
        record: ExperimentRecord,
        folder: Folder,
        *,
        metric: str | None,
        mode: str | None,
        scope: str = "last",
    ):
        self.record = record
        self.folder = folder
        self.metric = metric or record.metric
        self.mode = mode or (record.mode if self.metric == record.metric else None)
        self.scope = scope

    def __repr__(self) -> str:
        return f"<Analysis of {self.name!r}: {len(self.trials)} trials, {self.state}>"

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def path(self) -> str:
        return self.record.path

    @property
    def trials(self) -> tuple[TrialRecord, ...]:
        """Every trial, in the order of creation."""
        return self.record.trials

    @property
    def problems(self) -> tuple[Problem, ...]:
        return self.record.problems

    @property
    def state(self) -> str:
        """ "finished", "running" or "interrupted".

        An experiment with unfinished trials counts as running until nothing has been written for 11 minutes
        (Tune copies its files to the storage every five).
        """
        if self.trials and all(trial.status in ("TERMINATED", "ERROR", "UNKNOWN") for trial in self.trials):
            return "finished"
        last = self.record.last_write
        return "running" if last is not None and time.time() - last < _QUIET_S else "interrupted"

    def reload(self) -> Analysis:
        """Return the experiment as it stands now."""
        return Analysis(
            read_experiment(self.folder), self.folder, metric=self.metric, mode=self.mode, scope=self.scope
        )

    def require_metric(self) -> tuple[str, str]:
        """Return metric and mode. Raises `ValueError` that says what may be passed where one is missing."""
        if self.metric is None or self.mode is None:
            missing = " and ".join(
                name for name, value in (("metric", self.metric), ("mode", self.mode)) if not value
            )
            raise ValueError(
                f"the experiment {self.name!r} does not say its {missing}: "
                f'pass analyze(…, metric="{self.metric or "NAME"}", mode="min" or "max"). '
                f"Numbers that its trials reported: {', '.join(self.reported_numbers) or 'none'}"
            )
        if self.reported_numbers and self.metric not in self.reported_numbers:
            raise ValueError(
                f"no trial reported a number named {self.metric!r}; "
                f"reported: {', '.join(self.reported_numbers)}"
            )
        return self.metric, self.mode

    @cached_property
    def reported_numbers(self) -> tuple[str, ...]:
        """The names under which trials reported numbers, without those that Tune adds."""
        names: dict[str, None] = {}
        for trial in self.trials:
            for row in (*trial.rows[:1], trial.last_result or {}):
                plain_row = {key: value for key, value in row.items() if key != "config"}
                for name, value in frames.flatten(plain_row).items():
                    if isinstance(value, (int, float)) and not isinstance(value, bool):
                        names[name] = None
        return tuple(name for name in names if name not in TUNES_OWN)

    @cached_property
    def scores(self) -> tuple[Score, ...]:
        """Each trial's last and best value of the metric, in the order of `trials`."""
        metric, mode = self.require_metric()
        return tuple(score(self._rows(trial), metric, mode) for trial in self.trials)

    @staticmethod
    def _rows(trial: TrialRecord) -> tuple[Mapping[str, Any], ...]:
        """A trial's reports; where its result.json is lost, the last one that Tune's state has."""
        return trial.rows or ((trial.last_result,) if trial.last_result else ())

    @cached_property
    def _best(self) -> int:
        winner = best_index(self.scores, self.require_metric()[1], self.scope)
        if winner is None:
            raise ValueError(f"no trial of {self.name!r} has a finite {self.scope} value of {self.metric!r}")
        return winner

    @property
    def has_best(self) -> bool:
        """Whether any trial has a finite value to be compared by."""
        if self.metric is None or self.mode is None or self.metric not in self.reported_numbers:
            return False
        return best_index(self.scores, self.mode, self.scope) is not None

    @property
    def best_trial(self) -> TrialRecord:
        """The best trial. NaN and infinities never win, and of equals the earlier trial does."""
        return self.trials[self._best]

    @property
    def best_value(self) -> float:
        """The metric by which the best trial won."""
        scored = self.scores[self._best]
        return scored.last if self.scope == "last" else scored.best

    @property
    def best_result(self) -> dict[str, Any]:
        """The best trial's last report; with scope "all" its best one."""
        rows = self._rows(self.best_trial)
        row = self.scores[self._best].best_row if self.scope == "all" else None
        return dict(rows[row if row is not None else -1])

    @property
    def best_config(self) -> dict[str, Any]:
        """The best trial's hyperparameters, as they were at its best result."""
        # Under PopulationBasedTraining a trial's configuration changes: the report has the one that counts.
        if config_changes(self.best_trial) and isinstance(self.best_result.get("config"), dict):
            return dict(self.best_result["config"])
        return dict(self.best_trial.config)

    @property
    def best_logdir(self) -> str:
        """The best trial's folder: a path, or a URI where the experiment's storage is one."""
        return self.best_trial.directory

    @property
    def best_result_df(self) -> pd.DataFrame:
        """The best result as a frame of one row, indexed by the trial's id."""
        result = self.best_result
        flat = frames.flatten({key: value for key, value in result.items() if key != "config"})
        flat |= frames.flatten(self.best_config, "config/")
        flat["trial_id"] = self.best_trial.trial_id
        return frames.frame([flat]).set_index("trial_id")

    @property
    def best_checkpoint(self) -> Any:
        """The best trial's best checkpoint by the metric as `ray.tune.Checkpoint`; None where it has none."""
        from ray.tune import Checkpoint

        folder = self._best_checkpoint_folder
        return None if folder is None else Checkpoint(folder.path, filesystem=folder.filesystem)

    @property
    def best_checkpoint_path(self) -> str | None:
        """Where the best checkpoint lies."""
        return None if self._best_checkpoint_folder is None else self._best_checkpoint_folder.shown

    @cached_property
    def _best_checkpoint_folder(self) -> Folder | None:
        metric, mode = self.require_metric()
        trial = self.best_trial
        if not trial.directory:
            return None
        home = self.folder.below(trial.folder_name)
        on_disk = {e.name for e in home.entries() if e.is_dir and e.name.startswith("checkpoint_")}
        measured = {
            name: value_of(metrics, metric) for name, metrics in checkpoints_of(trial.checkpoint_blob or "")
        }
        chosen, best = None, math.nan
        for name in sorted(on_disk):
            value = measured.get(name)
            if value is not None and is_better(value, best, mode):
                chosen, best = name, value
        # A checkpoint that Tune's state has not measured: the newest is the nearest to the last result.
        chosen = chosen or max(on_disk, default=None)
        return None if chosen is None else home.below(chosen)

    def dataframe(self) -> pd.DataFrame:
        """One row a trial, in the order of creation.

        Columns: trial_id, status, the metric (its last value), best_<metric>, best_iteration, iterations,
        start and end (UTC), duration_s, ranks, hosts and start_s (NA where the reports do not say), error
        (its last line), num_failures, logdir, and the configuration as config/….
        """
        scored: list[Score | None] = list(self.scores) if self._scored else [None] * len(self.trials)
        return frames.trials_frame(self.trials, scored, self.metric)

    @property
    def _scored(self) -> bool:
        return self.metric is not None and self.mode is not None and self.metric in self.reported_numbers

    def history(self) -> pd.DataFrame:
        """One row a report, by trial and then in the order of reporting.

        Columns: trial_id, training_iteration, attempt (counts the trial's starts), time (UTC; Tune writes
        whole seconds), elapsed_s since the experiment's start, then whatever was reported. Configurations are
        there as config/… when they change within trials, as under PopulationBasedTraining.
        """
        changing = any(config_changes(trial) for trial in self.trials)
        return frames.history_frame(self.trials, self.record.start_time, changing)

    @cached_property
    def trial_dataframes(self) -> dict[str, pd.DataFrame]:
        """One frame of reports for each trial_id."""
        start = self.record.start_time
        return {trial.trial_id: frames.history_frame([trial], start, True) for trial in self.trials}

    def errors(self) -> dict[str, str]:
        """The full text of each failed trial's error file, by trial_id."""
        return {t.trial_id: plain_text(t.error) for t in self.trials if t.error is not None}
