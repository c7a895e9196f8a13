"""`analyze` opens an experiment; `Analysis` has its results and frames, and shows itself in notebooks."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from functools import cached_property
from html import escape
from typing import Any

import pandas as pd

from horovod_tune.analysis import frames
from horovod_tune.analysis.pareto import ParetoFront, pareto_front
from horovod_tune.analysis.printable import counted
from horovod_tune.analysis.reader.folders import Folder, open_folder, shown_place
from horovod_tune.analysis.reader.tune_files import read_experiment
from horovod_tune.analysis.results import Results
from horovod_tune.analysis.trial_details import config_changes
from horovod_tune.scoring import Limit, check_metric, parse_limit


class Analysis(Results):
    """An experiment's results as they were when it was read; `reload()` reads a running one again.

    `trials` has every trial, in the order of creation; `record` has everything that was read, `problems`
    lists what could not be. `run` names the search by its first driver's start time (None without a state
    file), `runs` all searches that wrote into the folder, oldest first.
    """

    def __repr__(self) -> str:
        return f"<Analysis of {self.name!r}: {counted(len(self.trials), 'trial')}, {self.state}>"

    @property
    def best_result_df(self) -> pd.DataFrame:
        """The best result as a frame of one row, indexed by the trial's id."""
        best = self.best_result | {"config": self.best_config, "trial_id": self.best_trial.trial_id}
        return frames.frame([frames.flatten(best)]).set_index("trial_id")

    def dataframe(self) -> pd.DataFrame:
        """Return one row per trial, in the order of creation.

        Columns: trial_id, status, the metric (its last value), best_<metric>, best_iteration, iterations,
        start and end (UTC), duration_s, ranks, hosts and start_s (all three NA if the reports lack them),
        num_failures, error (in one line), logdir, and the configuration at the last report as config/…. A
        metric whose columns would have one of these names, such as `iteration`, becomes reported_….
        """
        return frames.trials_frame(
            self.trials, self.scores if self.is_known_metric else None, self.metric or ""
        )

    def history(self) -> pd.DataFrame:
        """Return one row per report, by trial and then in the order of reporting.

        Columns: trial_id, training_iteration, attempt (one more at each report whose iteration does not
        increase), time (UTC), elapsed_s since the experiment's start, then all that was reported; a metric
        with one of these names becomes reported_…. Configurations are included as config/… if they change
        within trials, as under PopulationBasedTraining.
        """
        changing = any(map(config_changes, self.trials))
        return frames.history_frame(self.trials, self.record.start_time, changing)

    @cached_property
    def trial_dataframes(self) -> dict[str, pd.DataFrame]:
        """Each trial's reports as a frame like `history`, always with config/…, by trial_id."""
        start = self.record.start_time
        return {trial.trial_id: frames.history_frame([trial], start, True) for trial in self.trials}

    def pareto_front(self, metrics: Mapping[str, str] | None = None) -> ParetoFront:
        """Return the Pareto front: the results that no other result dominates.

        `metrics` maps names to "min" or "max": `{"accuracy": "max", "latency_ms": "min"}`; by default they
        are those that `BayesOptSearch` optimised. The last report of each trial counts, or with scope "all"
        every report of one of these metrics or a limit's. Results that violate the limits are left out.
        Raises `ValueError` for fewer than two metrics, an unknown mode, or a metric that was not reported.
        """
        return pareto_front(self, self.record.front if metrics is None else metrics)

    def _repr_html_(self) -> str:
        try:
            from horovod_tune.analysis.terminal import as_html, view
        except ImportError:  # rich is an extra
            return f"<pre>{escape(repr(self))}</pre>"
        return as_html(view(self, rows=10, width=140, with_summary=False))


def analyze(
    experiment: Any,
    *,
    metric: str | None = None,
    mode: str | None = None,
    scope: str = "last",
    limits: Iterable[str | Limit] | None = None,
    run: str | None = None,
    filesystem: Any = None,
) -> Analysis:
    """Read a Tune experiment: finished, interrupted or still running.

    Args:
        experiment: what `tune.run` or `Tuner.fit` returned (only the trials of that search are read), or the
            experiment's folder as a local path or any URI that Tune's storage accepts.
        metric: the metric by which trials are compared; by default the experiment's own.
        mode: "min" or "max"; by default the experiment's own.
        scope: how trials are compared: by their "last" value, as Tune does, or by the best of "all".
        limits: conditions that the best result must meet, such as ["latency_ms <= 20"]; by default those of
            `BayesOptSearch`, [] for none.
        run: one of `Analysis.runs`, if several searches wrote into the folder. By default the newest, with a
            warning that names the others.
        filesystem: the pyarrow filesystem of a path that needs one (as in `RunConfig(storage_filesystem=…)`).

    Raises:
        TypeError: `experiment` is of another type, or `limits` is not a list.
        FileNotFoundError: the folder does not exist.
        ValueError: the folder contains no experiment or no such run, or an argument is invalid.
    """
    check_metric(metric, mode)
    if scope not in ("last", "all"):
        raise ValueError(f'scope must be "last" or "all", got {scope!r}')
    given: list[Limit] | None = None
    if limits is not None:
        if isinstance(limits, str) or not isinstance(limits, Iterable):
            raise TypeError(f'limits must be a list such as ["latency_ms <= 20"], got {limits!r}')
        given = [limit if isinstance(limit, Limit) else parse_limit(limit) for limit in limits]
    known_metric, known_mode, trial_ids = None, None, None
    if isinstance(experiment, (str, os.PathLike)):
        folder = open_folder(experiment, filesystem)
    else:
        tunes = getattr(experiment, "_experiment_analysis", experiment)
        filesystem, path = getattr(tunes, "_fs", None), getattr(tunes, "_experiment_fs_path", None)
        if filesystem is None or not isinstance(path, str):
            what = "must be a path, or what tune.run or Tuner.fit returned"
            raise TypeError(f"experiment {what}; got {type(experiment).__name__}")
        folder = Folder(filesystem, path, shown_place(filesystem, path))
        known_metric, known_mode = tunes.default_metric, tunes.default_mode
        if run is None and tunes.trials:
            trial_ids = frozenset(str(trial.trial_id) for trial in tunes.trials)
    record = read_experiment(folder, run=run, trial_ids=trial_ids)
    if run is None and trial_ids is None and len(record.runs) > 1:
        warnings.warn(f"{record.path}: {record.runs_note}", stacklevel=2)
    metric = metric or known_metric
    if mode is None and metric == known_metric:
        mode = known_mode
    kept = record.limits if given is None else given
    return Analysis(record, folder, metric=metric, mode=mode, scope=scope, limits=kept, trial_ids=trial_ids)
