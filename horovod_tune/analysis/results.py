"""`analyze`: what a search found, as attributes and pandas frames."""

from __future__ import annotations

import math
import os
import re
import time
import warnings
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import pandas as pd

from horovod_tune.analysis import frames
from horovod_tune.analysis.printable import one_line
from horovod_tune.analysis.reader.folders import Folder, open_folder
from horovod_tune.analysis.reader.records import ExperimentRecord, Problem, TrialRecord
from horovod_tune.analysis.reader.tune_fields import TUNES_OWN
from horovod_tune.analysis.reader.tune_files import read_experiment, result_of
from horovod_tune.analysis.reader.tune_pickles import checkpoints_of
from horovod_tune.analysis.scoring import SCOPES, Score, best_index, is_better, score, value_of
from horovod_tune.analysis.trial_facts import config_changes, plain_text

_CHECKPOINT = re.compile(r"checkpoint_[A-Za-z0-9_-]+")
_QUIET_S = 660.0  # Tune copies to its storage every 300 s; two of these without a sign is an end


class MetricUnknown(ValueError):
    """Raised where trials are to be compared and nobody said by which metric, or which way is better."""


def analyze(
    experiment: Any,
    *,
    metric: str | None = None,
    mode: str | None = None,
    scope: str = "last",
    run: str | None = None,
    filesystem: Any = None,
) -> Analysis:
    """Read a Tune experiment: finished, interrupted or still running.

    Args:
        experiment: what `tune.run` or `Tuner.fit` returned (its own trials count, whatever else lies in the
            folder), or the experiment's folder as a local path or any URI that Tune's storage takes.
        metric: what trials are compared by; the experiment's own unless given.
        mode: "min" or "max"; the experiment's own unless given.
        scope: how trials are compared: by their "last" value, as Tune does, or by the best of "all".
        run: which search of the folder, where several of one name wrote into it: one of `Analysis.runs`.
            The newest unless given, with a warning that names the others.
        filesystem: the pyarrow filesystem of a path that needs one (as in `RunConfig(storage_filesystem=…)`).

    Raises:
        TypeError: `experiment` is something else.
        FileNotFoundError: there is no such folder.
        ValueError: it holds no experiment or no such run, or an argument is out of bounds.
    """
    if mode not in (None, "min", "max"):
        raise ValueError(f'mode must be "min" or "max", got {mode!r}')
    if scope not in SCOPES:
        raise ValueError(f'scope must be "last" or "all", got {scope!r}')
    if isinstance(experiment, Analysis):
        return Analysis(experiment.record, experiment.folder, metric=metric, mode=mode, scope=scope)
    known: tuple[str | None, str | None] = (None, None)
    trial_ids = None
    if isinstance(experiment, (str, os.PathLike)):
        folder = open_folder(experiment, filesystem)
    else:
        result = result_of(experiment)
        if result is None:
            raise TypeError(
                "experiment must be a path, or what tune.run or Tuner.fit returned; "
                f"got {type(experiment).__name__}"
            )
        folder, known = result.folder, (result.metric, result.mode)
        trial_ids = result.trial_ids if run is None else None
    record = read_experiment(folder, run=run, trial_ids=trial_ids)
    if run is None and trial_ids is None and len(record.runs) > 1:
        warnings.warn(f"{record.path}: {several_runs(record)}", stacklevel=2)
    metric_known, mode_known = known[0] or record.metric, known[1] or record.mode
    if metric is None:
        metric, mode = metric_known, mode or mode_known
    elif mode is None and metric == metric_known:
        mode = mode_known
    return Analysis(record, folder, metric=metric, mode=mode, scope=scope, trial_ids=trial_ids)


def several_runs(record: ExperimentRecord) -> str:
    """Say which of a folder's searches this is, and how to choose another."""
    others = ", ".join(name for name in record.runs if name != record.run)
    which = "the newest" if record.run == record.runs[-1] else "one"
    return (
        f"{len(record.runs)} searches wrote into this folder; this is {which} of them, {record.run}. "
        f'Choose with analyze(…, run="…") or --run: {others}'
    )


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
        trial_ids: frozenset[str] | None = None,
    ):
        self._trial_ids = trial_ids
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
    def run(self) -> str | None:
        """Which search of its folder this is: when its driver started. None where its state file is lost."""
        return self.record.run

    @property
    def runs(self) -> tuple[str, ...]:
        """All searches that wrote into the folder, the oldest first: what `analyze(…, run=…)` takes."""
        return self.record.runs

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
        ids = self._trial_ids
        again = read_experiment(self.folder, run=self.record.run if ids is None else None, trial_ids=ids)
        return Analysis(
            again, self.folder, metric=self.metric, mode=self.mode, scope=self.scope, trial_ids=ids
        )

    def require_metric(self) -> tuple[str, str]:
        """Return metric and mode. Raises `MetricUnknown` that says what to pass where one is missing."""
        if self.metric is None or self.mode is None:
            missing = " and ".join(
                name for name, value in (("metric", self.metric), ("mode", self.mode)) if not value
            )
            name = one_line(self.metric or "NAME")
            raise MetricUnknown(
                f"the experiment {self.name!r} does not say its {missing}: "
                f'pass analyze(…, metric="{name}", mode="min" or "max"), '
                f"or --metric {name} and --mode min or max to horovod-tune. "
                f"Numbers that its trials reported: {self._reported_text}"
            )
        if self.reported_numbers and self.metric not in self.reported_numbers:
            raise MetricUnknown(
                f"no trial reported a number named {self.metric!r}; reported: {self._reported_text}"
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

    @property
    def _reported_text(self) -> str:
        return ", ".join(map(one_line, self.reported_numbers[:30])) or "none"

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
        # Not checkpoint_000001.part: a copy that a full disk or a kill has ended.
        on_disk = {e.name for e in home.entries() if e.is_dir and _CHECKPOINT.fullmatch(e.name)}
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
