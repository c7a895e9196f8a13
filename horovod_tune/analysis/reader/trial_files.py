"""Reads one trial's folder: `result.json` (one report per line) or `progress.csv`, `params.json`, errors.

A part of `tune_files.py`'s adapter to Tune's private files; checked against Ray 2.60.0.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from horovod_tune.analysis.reader.folders import LARGEST, Folder
from horovod_tune.analysis.reader.plain_values import OBJECT, mapping, read_json
from horovod_tune.analysis.reader.records import Problem, TrialRecord
from horovod_tune.analysis.reader.tune_fields import seconds

_LONGEST_TEXT = 200_000
_LARGEST_ERROR = 200_000  # bytes: a traceback's two ends


def with_files(
    folder: Folder, staged: Folder | None, trial: TrialRecord
) -> tuple[TrialRecord, list[Problem]]:
    """The trial with its reports and its error's text."""
    name = trial.folder_name
    if not name:
        return trial, []
    copied = staged.below(name) if staged is not None else None
    files = _TrialFiles(folder.below(name), copied, trial.trial_id)
    results = files.longer("result.json")
    rows = _rows(results, files) if results is not None else []
    rows = rows or _csv_rows(files)
    if not rows and trial.last_result is not None:
        files.note("result.json is missing or empty; only its last report is known")
    if not rows and trial.last_result is None and trial.status in ("TERMINATED", "UNKNOWN"):
        files.note("it has no reports")
    config = trial.config
    if trial.status == "UNKNOWN" or OBJECT in str(config):  # params.json has objects as text
        config = _params(files, rows) or config
    error = trial.error
    if error is not None:
        text = files.longer("error.txt", _LARGEST_ERROR)
        error = text.decode("utf-8", "replace") if text else "error.txt is missing"
    return _completed(replace(trial, config=config, error=error), rows), files.problems


class _TrialFiles:
    """A trial's folder in the storage and the driver's copy of it; what cannot be read is noted."""

    def __init__(self, stored: Folder, staged: Folder | None, where: str):
        self._stored, self._staged, self._where = stored, staged, where
        self.problems: list[Problem] = []

    def note(self, what: str) -> None:
        self.problems.append(Problem(self._where, what))

    def longer(self, name: str, ends: int | None = None) -> bytes | None:
        """The file from storage, or the driver's copy where that has more; with `ends`, its two ends only."""
        try:
            place = self._stored
            if self._staged is not None and self._staged.size(name) > self._stored.size(name):
                place = self._staged
            return place.read(name, LARGEST) if ends is None else place.read_ends(name, ends)
        except OSError as error:
            self.note(f"{name} cannot be read: {error}")
            return None


def _params(files: _TrialFiles, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    data = files.longer("params.json")
    if not data:
        if not rows or not mapping(rows[-1].get("config")):
            files.note("params.json is missing")
        return {}
    try:
        config, cut = read_json(data)
    except ValueError as error:
        files.note(f"params.json is not readable ({error})")
        return {}
    for what in cut:
        files.note(f"params.json: {what} is left out")
    return mapping(config)


def _rows(data: bytes, files: _TrialFiles) -> list[dict[str, Any]]:
    rows = []
    lines = data.split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row, cut = read_json(line)
            if not isinstance(row, dict):
                raise ValueError("no JSON object")
        except ValueError:
            half = number == len(lines)
            what = "ends in a half-written report" if half else f"line {number} is not a report"
            files.note(f"result.json: {what}; that report is left out")
            continue
        rows.append(row)
        for what in cut:
            files.note(f"result.json: line {number}: {what} is left out")
    return rows


def _csv_rows(files: _TrialFiles) -> list[dict[str, Any]]:
    """The reports in `progress.csv`, which Tune writes next to result.json, with nested names flat."""
    data = files.longer("progress.csv")
    if not data:
        return []
    rows: list[dict[str, Any]] = []
    for line in csv.DictReader(io.StringIO(data.decode("utf-8", "replace"), newline="")):
        row: dict[str, Any] = {}
        for name, text in line.items():
            if name is None or text is None or text == "":
                continue
            if name.startswith("config/"):
                row.setdefault("config", {})[name.removeprefix("config/")] = _csv_value(text)
            else:
                row[name] = _csv_value(text)
        rows.append(row)
    return rows


def _csv_value(text: str) -> Any:
    """
    >>> [_csv_value(text) for text in ("3", "0.5", "True", "relu")]
    [3, 0.5, True, 'relu']
    """
    if text in ("True", "False"):
        return text == "True"
    try:
        return int(text) if len(text) < 300 and re.fullmatch(r"[+-]?\d+", text) else float(text)
    except ValueError:
        return text[:_LONGEST_TEXT]


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
    config = trial.config or mapping(last.get("config"))
    start = trial.start_time
    first, spent = seconds(rows[0].get("timestamp")), seconds(rows[0].get("time_total_s"))
    if start is None and first is not None and spent is not None:
        start = max(0.0, first - spent)
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
