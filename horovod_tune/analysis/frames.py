"""Reports and trials as pandas frames, with their types kept."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from horovod_tune.analysis.reader.plain_values import iteration_of, seconds
from horovod_tune.analysis.reader.records import TrialRecord
from horovod_tune.analysis.trial_details import (
    attempts,
    config_at,
    error_line,
    hosts_of,
    iterations_of,
    ranks_of,
    report_times,
)


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested dictionary, with the keys joined by `/`, as Tune does.

    >>> flatten({"net": {"width": 3}, "sizes": [1, 2]})
    {'net/width': 3, 'sizes': [1, 2]}
    """
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}/"))
        else:
            flat[name] = value
    return flat


def typed(values: Sequence[Any], index: pd.Index | None = None) -> pd.Series:
    """Return a column that keeps its values' type even if some are missing: integers stay integers."""
    present = [value for value in values if value is not None]
    kinds = {type(value) for value in present}
    whole = len(present) == len(values)
    if kinds == {bool}:
        return pd.Series(values, index=index, dtype="bool" if whole else "boolean")
    if kinds == {int} and all(-(2**63) <= value < 2**63 for value in present):
        return pd.Series(values, index=index, dtype="int64" if whole else "Int64")
    if float in kinds and kinds <= {int, float}:
        return pd.Series([math.nan if v is None else float(v) for v in values], index=index, dtype="float64")
    return pd.Series(values, index=index, dtype="str" if kinds == {str} and whole else "object")


def frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return flat rows as a frame whose columns are in the order of first appearance."""
    names = dict.fromkeys(name for row in rows for name in row)
    index = pd.RangeIndex(len(rows))
    columns = {name: typed([row.get(name) for row in rows], index) for name in names}
    return pd.DataFrame(columns, index=index)


def clock(unix_s: pd.Series) -> pd.Series:
    """Return Unix times in seconds as UTC timestamps, to the microsecond; NaN becomes NaT."""
    # Not pd.to_datetime(unit="s"): pandas 2.3 computes with uninitialised memory if a time is missing.
    values = unix_s.to_numpy(dtype=float)
    finite = np.isfinite(values)
    moments = np.full(len(values), np.datetime64("NaT", "ns"))
    moments[finite] = (np.round(values[finite] * 1e6).astype("int64") * 1000).astype("datetime64[ns]")
    return pd.Series(pd.DatetimeIndex(moments, tz="UTC"), index=unix_s.index)


# The columns of `Analysis.dataframe` and `Analysis.history` that are not reported values.
TRIAL_COLUMNS = (
    *("trial_id", "status", "best_iteration", "iterations", "start", "end", "duration_s", "ranks", "hosts"),
    *("start_s", "num_failures", "error", "logdir"),
)
REPORT_COLUMNS = ("trial_id", "training_iteration", "attempt", "time", "elapsed_s")
_PREFIX = "reported_"
_SCORES = ("last", "best", "best_iteration")


def column_of(metric: str, ours: Collection[str], variant: str = "") -> str:
    """Return a metric's column: its name, with `reported_` before it if one of our columns has that name.

    A `variant`, such as `best_`, precedes the name of a second column of the metric.

    >>> [column_of(name, REPORT_COLUMNS) for name in ("loss", "time", "reported_time")]
    ['loss', 'reported_time', 'reported_reported_time']
    >>> column_of("iteration", TRIAL_COLUMNS), column_of("iteration", TRIAL_COLUMNS, "best_")
    ('reported_iteration', 'best_reported_iteration')
    """
    stem = metric
    while stem.startswith(_PREFIX):  # a metric may have such a name too
        stem = stem.removeprefix(_PREFIX)
    return f"{variant}{_PREFIX if {stem, f'best_{stem}'} & {*ours} else ''}{metric}"


def metrics_in(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of `Analysis.dataframe` by the names under which trials reported."""
    own = {"training_iteration": row["iterations"]} if "iterations" in row else {}
    metrics = [name.removeprefix(_PREFIX) for name in row if name.startswith(_PREFIX)]
    columns = {metric: column_of(metric, TRIAL_COLUMNS) for metric in metrics}
    return own | dict(row) | {metric: row[name] for metric, name in columns.items() if name in row}


def trials_frame(trials: Sequence[TrialRecord], scores: pd.DataFrame | None, metric: str) -> pd.DataFrame:
    """Return one row per trial: see `Analysis.dataframe`."""
    made = frame([_trial_row(trial) for trial in trials])
    if scores is not None:
        names = [column_of(metric, TRIAL_COLUMNS, variant) for variant in ("", "best_")]
        for place, (name, column) in enumerate(zip((*names, "best_iteration"), _SCORES, strict=True), 2):
            made.insert(place, name, scores[column])
    types = {"ranks": "Int64", "start_s": "float64"}
    made = made.astype({name: dtype for name, dtype in types.items() if name in made})
    return made.assign(**{name: clock(made[name]) for name in ("start", "end") if name in made})


def _trial_row(trial: TrialRecord) -> dict[str, Any]:
    start, end = (math.nan if time is None else time for time in (trial.start_time, trial.end_time))
    return {
        "trial_id": trial.trial_id,
        "status": trial.status,
        "iterations": iterations_of(trial),
        "start": start,
        "end": end,
        "duration_s": end - start,
        "ranks": ranks_of(trial),
        "hosts": hosts_of(trial),
        "start_s": seconds((trial.last_result or {}).get("start_s")),
        "num_failures": trial.num_failures,
        "error": error_line(trial.error),
        "logdir": trial.directory,
        **flatten(config_at(trial), "config/"),
    }


def history_frame(trials: Sequence[TrialRecord], start_time: float | None, with_config: bool) -> pd.DataFrame:
    """Return one row per report: see `Analysis.history`."""
    zero = start_time if start_time is not None else math.nan
    made = frame([row for trial in trials for row in _report_rows(trial, zero, with_config)])
    if "time" in made:
        made["time"] = clock(made["time"])
    return made


def _report_rows(trial: TrialRecord, zero: float, with_config: bool) -> Iterator[dict[str, Any]]:
    times = report_times(trial).tolist()
    for row, time, attempt in zip(trial.rows, times, attempts(trial.rows), strict=False):
        made = {"trial_id": trial.trial_id, "training_iteration": iteration_of(row), "attempt": attempt}
        made |= {"time": time, "elapsed_s": time - zero}
        left_out = {"trial_id", "training_iteration"}
        if not (with_config and row.get("config") and isinstance(row["config"], Mapping)):
            left_out.add("config")
        reported = flatten({name: value for name, value in row.items() if name not in left_out})
        yield made | {column_of(name, REPORT_COLUMNS): value for name, value in reported.items()}
