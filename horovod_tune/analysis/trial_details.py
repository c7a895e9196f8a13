"""Details of one trial's record: the times of its reports, its ranks and hosts, its start, its error."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from horovod_tune.analysis.reader.plain_values import iteration_of, mapping, seconds
from horovod_tune.analysis.reader.records import TrialRecord
from horovod_tune.errors import LAST_OUTPUT

# The first line of TrainingFailed (`coordinator/failures.py`).
_RANK = re.compile(r"rank \d+ of \d+ on .+:$")
# A host and its number of ranks in Horovod's notation: `n1:2,n2:2` is ranks 0 and 1 on n1, 2 and 3 on n2.
_HOST = re.compile(r"([^\s:,]+):([1-9]\d{0,5})")
_CLASS_OF_A_RANKS_ERROR = re.compile(r"^horovod_tune\.errors\.\w+: (?=rank \d+ of )")
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def report_times(trial: TrialRecord) -> np.ndarray:
    """Return the Unix time of each report in seconds, shape (reports,); NaN if it is not recorded.

    Tune records whole seconds. The fraction is estimated from the training time between a report and the
    trial's end, and clipped to the recorded second.
    """
    stamps = np.array([seconds(row.get("timestamp")) for row in trial.reports], dtype=float)
    spent = np.array([seconds(row.get("time_total_s")) for row in trial.reports], dtype=float)
    end = trial.end_time if trial.end_time is not None else math.nan
    guesses = np.clip(end - (spent[-1:] - spent), stamps, stamps + 0.999)
    times = np.fmax.accumulate(np.where(np.isfinite(guesses), guesses, stamps))
    return np.where(np.isnan(stamps), math.nan, times)


def attempts(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the attempt of each report: 1, and one more whenever its iteration does not increase.

    >>> attempts([{"training_iteration": n} for n in (1, 2, 2, 3, 1)])
    [1, 1, 2, 2, 3]
    """
    iterations = np.array([0, *map(iteration_of, rows)], dtype=float)
    numbered = np.isfinite(iterations)
    falls = np.zeros(len(iterations), dtype=int)
    falls[numbered] = np.diff(iterations[numbered], prepend=-1.0) <= 0
    return (1 + falls.cumsum()[1:]).tolist()


def iterations_of(trial: TrialRecord) -> int:
    """Return the trial's highest iteration; 0 if there is none."""
    return max((iteration_of(row) or 0 for row in trial.reports), default=0)


def config_changes(trial: TrialRecord) -> list[int]:
    """Return the reports from which on a trial's hyperparameters are new, as in PopulationBasedTraining."""
    configs = [row.get("config") for row in trial.rows]
    return [row for row in range(1, len(configs)) if configs[row] != configs[row - 1]]


def rank_changes(trial: TrialRecord) -> list[tuple[int, str]]:
    """Return each change of an elastic trial's ranks: the iteration that followed, and the reason."""
    reasons, before = [], 0
    for row in trial.rows:
        changes, reason = row.get("world_changes"), row.get("world_change")
        if isinstance(changes, int) and isinstance(reason, str) and changes > before:
            reasons.append((iteration_of(row) or 0, reason))
        before = changes if isinstance(changes, int) else 0
    return reasons


def config_at(trial: TrialRecord, report: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a trial's hyperparameters as they were at one of its reports, by default the last."""
    if not config_changes(trial):
        return trial.config
    return mapping((trial.rows[-1] if report is None else report).get("config")) or trial.config


def error_line(text: str | None) -> str | None:
    r"""Return a failure in one line: the rank, its host, what happened to it, and the cause.

    >>> error_line("TrainingFailed: rank 1 of 2 on b failed:\nTraceback:\n  at x\nValueError: two")
    'rank 1 of 2 on b failed: ValueError: two'
    >>> error_line("horovod_tune.errors.MetricsError: rank 0 of 2 on b failed: the metric 'x' is a list")
    "rank 0 of 2 on b failed: the metric 'x' is a list"
    """
    if text is None:
        return None
    lines = [line for line in plain_text(text).splitlines() if line.strip()]
    others = ("Failure #", LAST_OUTPUT)
    margin = [line for line in lines if not line[0].isspace() and not line.startswith(others)]
    cause = (margin or lines or ["(no text)"])[-1].strip()
    rank = next((match[0] for line in margin if (match := _RANK.search(line))), None)
    frames = [index for index, line in enumerate(lines) if line.startswith('  File "')]
    if frames and (rank is None or " failed:" in rank):
        # The exception's first line; the rest of its message, notes and our advice may follow.
        cause = next((line for line in lines[frames[-1] :] if not line[0].isspace()), cause)
    if rank is None or cause.endswith(rank):
        return _CLASS_OF_A_RANKS_ERROR.sub("", cause)
    # Ray describes a lost process in a paragraph; its first sentence is enough.
    return f"{rank} {cause.split('. ')[0]}" if " died:" in rank else f"{rank} {cause}"


def plain_text(text: str) -> str:
    """Return a text without the colours that Ray puts into its tracebacks."""
    return _ANSI.sub("", text)


def ranks_of(trial: TrialRecord) -> int | None:
    """Return the number of ranks from the trial's reports; None if they lack it."""
    size = (trial.last_result or {}).get("world_size")
    return size if isinstance(size, int) and not isinstance(size, bool) and 0 < size < 10**6 else None


def hosts_of(trial: TrialRecord) -> list[str] | None:
    """Return the host of each rank from the trial's reports; None if `hosts` is missing or the user's."""
    hosts = (trial.last_result or {}).get("hosts")
    matches = [_HOST.fullmatch(part) for part in hosts.split(",")] if isinstance(hosts, str) else [None]
    slots = [(match[1], int(match[2])) for match in matches if match]
    if not all(matches) or sum(count for _, count in slots) != ranks_of(trial):
        return None
    return [host for host, count in slots for _ in range(count)]


def spans(trial: TrialRecord, sessions: Sequence[float]) -> list[tuple[float, float, float]]:
    """Return each period in which a driver ran the trial: when start-up and training began, and the end.

    All are Unix times in seconds; `sessions` are the starts of the experiment's drivers. A period ends with
    the last report before the next driver's start, or before a pause of at least 2 s (as under HyperBand).
    A trial that has ever failed has no pauses: it may have done work in them that was lost.
    """
    if trial.start_time is None:
        return []
    first = trial.rows[0] if trial.rows else {}  # a later report may be from another start
    start_s = seconds((first or trial.last_result or {}).get("start_s")) or 0.0
    # Tune records when it begins to wait for reports. The start-up begins then if it is part of the first
    # report's duration (the workers start in Tune's first call of `step`), and otherwise ends then.
    total_s = seconds(first.get("time_total_s"))
    is_part = total_s is not None and start_s <= total_s
    begin = trial.start_time if is_part else trial.start_time - start_s
    trained = trial.start_time + start_s if is_part else trial.start_time
    periods: list[tuple[float, float, float]] = []
    before = trained
    for number, (report, time) in enumerate(zip(trial.reports, report_times(trial).tolist(), strict=True)):
        again = time - (seconds(report.get("time_this_iter_s")) or 0.0)
        start_s = seconds(report.get("start_s")) or 0.0
        drivers = [session for session in sessions if before < session < time]
        continued = number > 0 and report.get("iterations_since_restore") == 1 and not trial.num_failures
        if drivers or (continued and again - start_s > before + 2):
            since = max(drivers, default=before)
            periods.append((begin, trained, before))
            trained = max(since, again)
            begin = max(since, trained - start_s)
        before = max(before, time)  # a time that is not recorded is NaN
    end = max(trained, trial.end_time if trial.end_time is not None else trained)
    return [*periods, (begin, trained, end)]
