"""Reports and trials as pandas frames, with their types kept."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from .records import TrialRecord
from .scoring import Score

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LEADING = ("trial_id", "training_iteration", "attempt", "time", "elapsed_s")
_MISSING = object()


def flatten(nested: Mapping[str, Any], prefix: str = "", lists: bool = False) -> dict[str, Any]:
    """Return a nested dictionary flat, with `/` in the keys as Tune writes them.

    >>> flatten({"net": {"width": 3}, "sizes": [1, 2]})
    {'net/width': 3, 'sizes': [1, 2]}
    >>> flatten({"sizes": [1, 2]}, lists=True)
    {'sizes/0': 1, 'sizes/1': 2}
    """
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        name = f"{prefix}{key}"
        if lists and isinstance(value, (list, tuple)) and value:
            value = dict(enumerate(value))
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}/", lists))
        else:
            flat[name] = value
    return flat


def typed(values: Sequence[Any], index: pd.Index | None = None) -> pd.Series:
    """Return a column that keeps its values' type where some are missing: whole numbers stay whole."""
    present = [value for value in values if value is not _MISSING and value is not None]
    kinds = {type(value) for value in present}
    plain = [None if value is _MISSING else value for value in values]
    whole = len(present) == len(values)
    if not present:
        return pd.Series(plain, index=index, dtype=object)
    if kinds == {bool}:
        return pd.Series(plain, index=index, dtype="bool" if whole else "boolean")
    if kinds == {int} and all(-(2**63) <= value < 2**63 for value in present):
        return pd.Series(plain, index=index, dtype="int64" if whole else "Int64")
    if float in kinds and kinds <= {int, float}:
        return pd.Series([math.nan if v is None else float(v) for v in plain], index=index, dtype="float64")
    if kinds == {str}:
        return pd.Series(plain, index=index, dtype="str" if whole else "object")
    return pd.Series(plain, index=index, dtype=object)


def frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return flat rows as a frame whose columns stand in the order in which they first appear."""
    columns: dict[str, list[Any]] = {}
    for number, row in enumerate(rows):
        for name, value in row.items():
            column = columns.get(name)
            if column is None:
                column = columns[name] = [_MISSING] * len(rows)
            column[number] = value
    index = pd.RangeIndex(len(rows))
    return pd.DataFrame({name: typed(values, index) for name, values in columns.items()}, index=index)


def report_times(trial: TrialRecord) -> list[float]:
    """When each report came, in Unix time (seconds); NaN where it is not written down.

    Tune writes whole seconds. The time that training took, counted back from the moment of the last report,
    tells the fraction; it is used only as far as it agrees with what is written.
    """
    rows = trial.rows
    if not rows:
        return []
    end, spent = trial.end_time, rows[-1].get("time_total_s")
    times = []
    for row in rows:
        stamp, total = row.get("timestamp"), row.get("time_total_s")
        if not isinstance(stamp, (int, float)):
            times.append(math.nan)
            continue
        guess = float(stamp)
        if end is not None and isinstance(total, (int, float)) and isinstance(spent, (int, float)):
            guess = min(max(end - (spent - total), stamp), stamp + 0.999)
        times.append(max(guess, times[-1]) if times and times[-1] == times[-1] else guess)
    return times


def attempts(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Which start of the trial each report belongs to: 1, and one more whenever its iteration falls back.

    >>> attempts([{"training_iteration": n} for n in (1, 2, 1, 2, 3)])
    [1, 1, 2, 2, 2]
    """
    numbers, number, before = [], 1, 0
    for row in rows:
        iteration = row.get("training_iteration")
        if isinstance(iteration, int):
            if iteration <= before:
                number += 1
            before = iteration
        numbers.append(number)
    return numbers


def trial_rows(trial: TrialRecord, start_time: float | None, with_config: bool) -> list[dict[str, Any]]:
    """One flat dictionary a report."""
    flat = []
    for row, time, attempt in zip(trial.rows, report_times(trial), attempts(trial.rows), strict=True):
        known = time == time
        made: dict[str, Any] = {
            "trial_id": trial.trial_id,
            "training_iteration": row.get("training_iteration"),
            "attempt": attempt,
            "time": time,
            "elapsed_s": time - start_time if known and start_time is not None else math.nan,
        }
        for name, value in row.items():
            if name == "config":
                if with_config and isinstance(value, Mapping):
                    made.update(flatten(value, "config/"))
            elif name not in _LEADING:
                if isinstance(value, Mapping) and value:
                    made.update(flatten(value, f"{name}/"))
                else:
                    made[name] = value
        flat.append(made)
    return flat


def config_changes(trial: TrialRecord) -> bool:
    """Whether a trial's hyperparameters changed while it ran, as under PopulationBasedTraining."""
    if len(trial.rows) < 2:
        return False
    first = trial.rows[0].get("config")
    return any(row.get("config") != first for row in trial.rows[1:])


def with_times(made: pd.DataFrame) -> pd.DataFrame:
    if "time" in made:
        made["time"] = pd.to_datetime(made["time"], unit="s", utc=True)
    return made


def error_line(text: str | None) -> str | None:
    """The exception of a traceback: its last line that stands at the margin and is not blank."""
    if text is None:
        return None
    lines = [line for line in plain_text(text).splitlines() if line.strip()]
    margin = [line for line in lines if not line[0].isspace() and not line.startswith("Failure #")]
    return (margin or lines or ["(no text)"])[-1].strip()


def plain_text(text: str) -> str:
    """A text without the colours that Ray puts into its tracebacks."""
    return _ANSI.sub("", text)


def ranks_of(trial: TrialRecord) -> int | None:
    """How many ranks trained the trial, as its reports say; None where they do not."""
    size = (trial.last_result or {}).get("world_size")
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


def hosts_of(trial: TrialRecord) -> list[str] | None:
    """The hosts of the trial's ranks, as its reports say."""
    hosts = (trial.last_result or {}).get("hosts")
    if isinstance(hosts, str):
        return [hosts]
    return [str(host) for host in hosts] if isinstance(hosts, (list, tuple)) and hosts else None


def start_seconds(trial: TrialRecord) -> float | None:
    """How long the trial's start took, as its reports say."""
    seconds = (trial.last_result or {}).get("start_s")
    if isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and math.isfinite(seconds):
        return max(0.0, float(seconds))
    return None


def start_span(trial: TrialRecord) -> tuple[float, float] | None:
    """When a trial began to start up and when it began to train (Unix time, seconds); None before it began.

    Tune notes the moment from which it waits for reports. Workers that a trial starts within its first step
    start after that moment, and the first report's time covers it; otherwise they were started before it.
    """
    if trial.start_time is None:
        return None
    spent = start_seconds(trial) or 0.0
    first = trial.rows[0].get("time_total_s") if trial.rows else None
    if isinstance(first, (int, float)) and spent <= first:
        return trial.start_time, trial.start_time + spent
    return trial.start_time - spent, trial.start_time


_TRIAL_COLUMNS: tuple[str, ...] = (
    *("trial_id", "status", "iterations", "best_iteration", "start", "end", "duration_s"),
    *("ranks", "hosts", "start_s", "num_failures", "error", "logdir"),
)


def metric_column(metric: str) -> str:
    """The column of `dataframe()` with the metric's last value: its name, unless another column has it."""
    return f"last_{metric}" if metric in _TRIAL_COLUMNS else metric


def trial_row(trial: TrialRecord, scored: Score | None, metric: str | None) -> dict[str, Any]:
    """One flat dictionary a trial."""
    iterations = [row.get("training_iteration") for row in trial.rows]
    if not iterations and trial.last_result:
        iterations = [trial.last_result.get("training_iteration")]
    start, end = trial.start_time, trial.end_time
    row: dict[str, Any] = {"trial_id": trial.trial_id, "status": trial.status}
    if scored is not None and metric is not None:
        row[metric_column(metric)] = scored.last
        row[f"best_{metric}"] = scored.best
        row["best_iteration"] = scored.best_iteration
    row |= {
        "iterations": max((n for n in iterations if isinstance(n, int)), default=0),
        "start": start if start is not None else math.nan,
        "end": end if end is not None else math.nan,
        "duration_s": end - start if start is not None and end is not None else math.nan,
        "ranks": ranks_of(trial),
        "hosts": hosts_of(trial),
        "start_s": start_seconds(trial),
        "num_failures": trial.num_failures,
        "error": error_line(trial.error),
        "logdir": trial.directory,
    }
    return row | flatten(trial.config, "config/")
