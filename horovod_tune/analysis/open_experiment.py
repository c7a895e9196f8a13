"""`analyze` opens an experiment by its path, or from what Tune returned."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from typing import Any

from horovod_tune.analysis.reader.folders import Folder, open_folder, shown_place
from horovod_tune.analysis.reader.records import ExperimentRecord
from horovod_tune.analysis.reader.tune_files import read_experiment
from horovod_tune.analysis.results import Analysis
from horovod_tune.analysis.scoring import Limit, check_metric, parse_limit


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
        warnings.warn(f"{record.path}: {several_runs(record)}", stacklevel=2)
    metric = metric or known_metric
    if mode is None and metric == known_metric:
        mode = known_mode
    kept = record.limits if given is None else given
    return Analysis(record, folder, metric=metric, mode=mode, scope=scope, limits=kept, trial_ids=trial_ids)


def several_runs(record: ExperimentRecord) -> str:
    """Return a sentence on which of a folder's searches was read, and how to choose another."""
    others = ", ".join(name for name in record.runs if name != record.run)
    which = "the newest" if record.run == record.runs[-1] else "one"
    return (
        f"{len(record.runs)} searches wrote into this folder; this is {which} of them, {record.run}. "
        f'Choose another with analyze(…, run="…") or --run: {others}'
    )
