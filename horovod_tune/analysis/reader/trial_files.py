"""Reads one trial's folder: `result.json` (one report per line) or `progress.csv`, `params.json`, the error.

The format of these files is private to Tune (checked against Ray 2.60.0).
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import Any

from horovod_tune.analysis.reader.folders import Folder
from horovod_tune.analysis.reader.plain_values import OBJECT, iteration_of, mapping, read_object, seconds
from horovod_tune.analysis.reader.records import Problem, TrialRecord

_DATE = "%Y-%m-%d_%H-%M-%S"
_FAILED_AT = re.compile(r"^Failure # \d+ \(occurred at ([-_\d]{19})\)", re.MULTILINE)
_LONGEST_STEP_S = 30 * 86400.0  # the clocks of two machines, or a changed file, may differ by any time
_LARGEST_ERROR = 200_000  # bytes; the middle of a longer error is left out


def with_files(folder: Folder, trial: TrialRecord) -> tuple[TrialRecord, list[Problem]]:
    """Return the trial with its reports and error text, and the problems; `folder` is the experiment's."""
    if not trial.folder_name:
        return trial, []
    place = folder.below(trial.folder_name)
    problems: dict[Problem, None] = {}  # each once

    def tell(what: str) -> None:
        problems.setdefault(Problem(trial.trial_id, what))

    def read(name: str) -> bytes:
        try:
            return place.read(name) or b""
        except OSError as error:
            tell(f"{name} cannot be read: {error}")
            return b""

    rows = rows_of(read("result.json"), tell) or _csv_rows(read("progress.csv"), tell)
    if not rows and trial.last_result is not None:
        tell("result.json is missing or empty; only the last report is known")
    if not rows and trial.last_result is None and trial.status in ("TERMINATED", "UNKNOWN"):
        tell("no reports")
    config, error = trial.config, trial.error
    if trial.status == "UNKNOWN" or OBJECT in str(config):  # params.json has objects as text
        params = read("params.json")
        try:
            written = read_object(params or b"{}", lambda what: tell(f"params.json: {what} is left out"))
            config = written or config
        except ValueError as reason:
            tell(f"params.json is {reason}")
        if not params and not (rows and mapping(rows[-1].get("config"))):
            tell("params.json is missing")
    if error is not None or trial.status == "ERROR":
        text = read("error.txt") or b"error.txt is missing"
        if len(text) > _LARGEST_ERROR:
            half = _LARGEST_ERROR // 2
            left = b"\n[... %d bytes are left out here ...]\n" % (len(text) - 2 * half)
            text = text[:half] + left + text[-half:]
        error = text.decode("utf-8", "replace")
    return _completed(replace(trial, config=config, error=error), rows), list(problems)


def rows_of(data: bytes, tell: Callable[[str], object]) -> list[dict[str, Any]]:
    """Return the reports in a result.json, in order, and `tell` what is left out."""
    rows, lines = [], data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        cut: dict[str, None] = {}  # each once: a hostile line has millions
        try:
            row = read_object(line, cut.setdefault)
        except ValueError:
            half = number == len(lines)
            what = "ends in a half-written report" if half else f"line {number} is not a report"
            tell(f"result.json: {what}; that report is left out")
            continue
        rows.append({name: value if name == "config" else _with_nan(value) for name, value in row.items()})
        for what in cut:
            tell(f"result.json: line {number}: {what} is left out")
    return rows


def _with_nan(value: Any) -> Any:
    """Return a metric, or several: Tune's encoder writes NaN of NumPy's 32-bit floats as the text "null"."""
    if isinstance(value, dict):
        return {name: _with_nan(inner) for name, inner in value.items()}
    return math.nan if value == "null" else value


def _csv_rows(data: bytes, tell: Callable[[str], object]) -> list[dict[str, Any]]:
    """Return the reports in `progress.csv`, which Tune writes next to result.json, with flat names."""
    rows: list[dict[str, Any]] = []
    try:
        for line in csv.DictReader(io.StringIO(data.decode("utf-8", "replace"), newline="")):
            row = {
                name: text if name == "trial_id" else _csv_value(text)  # 1e234567 may be one
                for name, text in line.items()
                if name is not None and text
            }
            config = {name: row.pop(name) for name in list(row) if name.startswith("config/")}
            rows.append(row | {"config": {name[len("config/") :]: config[name] for name in config}})
    except csv.Error as error:
        where = f"report {len(rows) + 1} is not readable ({error})"
        tell(f"progress.csv: {where}; it and those after it are left out")
    return rows


def _csv_value(text: str) -> Any:
    """
    >>> [_csv_value(text) for text in ("3", "0.5", "True", "relu", "64_64")]
    [3, 0.5, True, 'relu', '64_64']
    """
    if text in ("True", "False"):
        return text == "True"
    if "_" in text:  # Python reads it as a number
        return text
    try:
        return int(text) if len(text) < 300 and re.fullmatch(r"[+-]?\d+", text) else float(text)
    except ValueError:
        return text


def _completed(trial: TrialRecord, rows: list[dict[str, Any]]) -> TrialRecord:
    """Return the trial with its rows, which may be newer than its state file."""
    if not rows:
        return trial
    last, status, trial_id = rows[-1], trial.status, trial.trial_id
    if status == "PENDING" and iteration_of(last) != iteration_of(trial.last_result or {}):
        status = "RUNNING"  # it has reported since the state was written; if not, it waits to continue
    if status == "UNKNOWN":
        trial_id = str(last.get("trial_id", trial_id))
        status = "ERROR" if trial.error is not None else "UNKNOWN"
        status = "TERMINATED" if last.get("done") is True else status
    start = trial.start_time
    first, spent = seconds(rows[0].get("timestamp")), seconds(rows[0].get("time_total_s"))
    if start is None and first is not None and spent is not None:
        start = max(0.0, first - spent)
    # A clock may be set back, and Ray 1.x recorded whole seconds.
    times = (trial.end_time, _failed_at(trial, last), *(seconds(row.get("timestamp")) for row in rows))
    ends = [each for each in times if each]
    return replace(
        trial,
        rows=tuple(rows),
        status=status,
        trial_id=trial_id,
        start_time=start,
        end_time=max(start or 0.0, *ends) if ends else None,
        config=trial.config or mapping(last.get("config")),
        # Tune marks the result of a function that returned only afterwards, in the state.
        last_result={**(trial.last_result or {}), **last, **_mark_of_the_end(trial, last)},
    )


def _mark_of_the_end(trial: TrialRecord, last: dict[str, Any]) -> dict[str, Any]:
    state = trial.last_result or {}
    same = "done" in last and iteration_of(state) == iteration_of(last)
    return {"done": True} if same and state.get("done") is True else {}


def _failed_at(trial: TrialRecord, last: dict[str, Any]) -> float | None:
    """Return the Unix time of a failed trial's end, from its error file and the clock of its last report."""
    failures = _FAILED_AT.findall(trial.error or "") if trial.status == "ERROR" else []
    reported = seconds(last.get("timestamp"))
    try:
        # Both are in the local time of the search's machines, which a reader elsewhere does not know.
        failed, dated = (datetime.strptime(text, _DATE) for text in (failures[-1], str(last.get("date"))))
    except (IndexError, ValueError):
        return None
    after_s = (failed - dated).total_seconds()
    return reported + after_s if reported is not None and 0 < after_s < _LONGEST_STEP_S else None
