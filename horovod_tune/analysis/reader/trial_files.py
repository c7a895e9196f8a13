"""Reads one trial's folder: `result.json` (one report a line), `params.json` and `error.txt`.

A part of `tune_files.py`'s adapter to Tune's private files; checked against Ray 2.60.0.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from horovod_tune.analysis.reader.folders import Folder
from horovod_tune.analysis.reader.records import Problem, TrialRecord
from horovod_tune.analysis.reader.tune_fields import seconds


def with_files(
    folder: Folder, staged: Folder | None, trial: TrialRecord
) -> tuple[TrialRecord, list[Problem]]:
    """The trial with its reports and its error's text."""
    problems: list[Problem] = []
    name = trial.folder_name
    where = trial.trial_id
    if not name:
        return trial, problems
    try:
        results = _longer(folder.below(name), staged and staged.below(name), "result.json")
        rows = _rows(results, where, problems) if results is not None else []
        if not rows and trial.last_result is not None:
            problems.append(Problem(where, "result.json is missing or empty; only its last report is known"))
        if not rows and trial.last_result is None and trial.status in ("TERMINATED", "UNKNOWN"):
            problems.append(Problem(where, "it has no reports"))
        config = trial.config
        if trial.status == "UNKNOWN":
            config = _params(
                _longer(folder.below(name), staged and staged.below(name), "params.json"), where, problems
            )
        error = trial.error
        if error is not None:
            text = _longer(folder.below(name), staged and staged.below(name), "error.txt")
            error = text.decode("utf-8", "replace") if text else "error.txt is missing"
    except OSError as problem:
        return trial, [Problem(where, f"its folder cannot be read ({problem})")]
    return _completed(replace(trial, config=config, error=error), rows), problems


def _longer(stored: Folder, staged: Folder | None, name: str) -> bytes | None:
    """The file from storage, or the driver's copy where that has more."""
    if staged is not None and staged.size(name) > stored.size(name):
        return staged.read(name)
    return stored.read(name)


def _params(data: bytes | None, where: str, problems: list[Problem]) -> dict[str, Any]:
    try:
        config = json.loads(data or b"")
        return config if isinstance(config, dict) else {}
    except ValueError as error:
        problems.append(Problem(where, f"params.json is not readable ({error})"))
        return {}


def _rows(data: bytes, where: str, problems: list[Problem]) -> list[dict[str, Any]]:
    rows = []
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("no JSON object")
            rows.append(row)
        except ValueError:
            half = number == len(lines)
            what = "ends in a half-written report" if half else f"line {number} is no report"
            problems.append(Problem(where, f"result.json: {what}; that report is left out"))
    return rows


def _completed(trial: TrialRecord, rows: list[dict[str, Any]]) -> TrialRecord:
    """The trial with its rows, and what the state file was too old to know."""
    if not rows:
        return trial
    last, status, trial_id = rows[-1], trial.status, trial.trial_id
    end = trial.end_time
    if status == "PENDING":
        status = "RUNNING"  # it has reported since the state was written
    if status == "UNKNOWN":
        trial_id = str(last.get("trial_id", trial_id))
        status = (
            "TERMINATED" if last.get("done") is True else "ERROR" if trial.error is not None else "UNKNOWN"
        )
    stamp = seconds(last.get("timestamp"))
    if stamp is not None and (end is None or stamp > end):
        end = stamp
    config = trial.config or last.get("config") or {}
    start = trial.start_time
    first, spent = seconds(rows[0].get("timestamp")), seconds(rows[0].get("time_total_s"))
    if start is None and first is not None and spent is not None:
        start = first - spent
    return replace(
        trial,
        rows=tuple(rows),
        status=status,
        trial_id=trial_id,
        start_time=start,
        end_time=end,
        config=config,
        last_result={**(trial.last_result or {}), **last},
    )
