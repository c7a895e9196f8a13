"""Reads one trial: its entry in the state file (JSON within JSON) and its folder.

The folder has `result.json` (one report per line) or `progress.csv`, `params.json` and errors. A part of
`tune_files.py`'s adapter to Tune's private files; checked against Ray 2.60.0.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from horovod_tune.analysis.reader.folders import Folder
from horovod_tune.analysis.reader.plain_values import (
    OBJECT,
    mapping,
    parse_json,
    plain,
    read_json,
    seconds,
    text_or_none,
)
from horovod_tune.analysis.reader.records import Problem, TrialRecord
from horovod_tune.analysis.reader.runs import folder_name_of, id_of

_LONGEST_TEXT = 200_000
_LARGEST_ERROR = 200_000  # bytes: a traceback's two ends


def with_files(
    folder: Folder, staged: Folder | None, trial: TrialRecord
) -> tuple[TrialRecord, list[Problem]]:
    """Return the trial with its reports and its error's text."""
    name = trial.folder_name
    if not name:
        return trial, []
    copied = staged.below(name) if staged is not None else None
    files = _TrialFiles(folder.below(name), copied, trial.trial_id)
    results = files.longer("result.json")
    rows = _rows(results, files) if results is not None else []
    rows = rows or _csv_rows(files)
    if not rows and trial.last_result is not None:
        files.add_problem("result.json is missing or empty; only its last report is known")
    if not rows and trial.last_result is None and trial.status in ("TERMINATED", "UNKNOWN"):
        files.add_problem("it has no reports")
    config = trial.config
    if trial.status == "UNKNOWN" or OBJECT in str(config):  # params.json has objects as text
        config = _params(files, rows) or config
    error = trial.error
    if error is not None:
        text = files.longer("error.txt") or b"error.txt is missing"
        if len(text) > _LARGEST_ERROR:
            half = _LARGEST_ERROR // 2
            left = b"\n[... %d bytes are left out here ...]\n" % (len(text) - 2 * half)
            text = text[:half] + left + text[-half:]
        error = text.decode("utf-8", "replace")
    return _completed(replace(trial, config=config, error=error), rows), files.problems


class _TrialFiles:
    """A trial's folder in the storage and the driver's copy of it; what cannot be read is noted."""

    def __init__(self, stored: Folder, staged: Folder | None, where: str):
        self._stored, self._staged, self._where = stored, staged, where
        self.problems: list[Problem] = []

    def add_problem(self, what: str) -> None:
        self.problems.append(Problem(self._where, what))

    def longer(self, name: str) -> bytes | None:
        """Return the file from storage, or the driver's copy if that has more."""
        try:
            place = self._stored
            if self._staged is not None and self._staged.size(name) > self._stored.size(name):
                place = self._staged
            return place.read(name)
        except OSError as error:
            self.add_problem(f"{name} cannot be read: {error}")
            return None


def _params(files: _TrialFiles, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    data = files.longer("params.json")
    if not data:
        if not rows or not mapping(rows[-1].get("config")):
            files.add_problem("params.json is missing")
        return {}
    try:
        config, cut = read_json(data)
    except ValueError as error:
        files.add_problem(f"params.json is not readable ({error})")
        return {}
    for what in cut:
        files.add_problem(f"params.json: {what} is left out")
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
            files.add_problem(f"result.json: {what}; that report is left out")
            continue
        rows.append(row)
        for what in cut:
            files.add_problem(f"result.json: line {number}: {what} is left out")
    return rows


def _csv_rows(files: _TrialFiles) -> list[dict[str, Any]]:
    """Return the reports in `progress.csv`, which Tune writes next to result.json, with nested names flat."""
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
    """Return the trial with its rows, and with what is newer than its state file."""
    if not rows:
        return trial
    last, status, trial_id = rows[-1], trial.status, trial.trial_id
    end = trial.end_time
    if status == "PENDING":
        status = "RUNNING"  # it has reported since the state was written
    if status == "UNKNOWN":
        trial_id = str(last.get("trial_id", trial_id))
        status = "ERROR" if trial.error is not None else "UNKNOWN"
        status = "TERMINATED" if last.get("done") is True else status
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


def trials_of_state(
    folder: Folder, state: dict[str, Any] | None, problems: list[Problem]
) -> list[TrialRecord]:
    """Return the trials of a state file in the order of creation."""
    trials = []
    for number, pair in enumerate((state or {}).get("trial_data", [])):
        try:
            trial, run = (_object(part) for part in pair)
            cut: list[str] = []
            made = _trial_of_state(folder, number, trial, run, cut)
        except (ValueError, TypeError, KeyError) as error:
            what = f"{type(error).__name__}: {error}"[:300]
            problems.append(Problem(f"trial {number} of the state file", what))
            continue
        trials.append(made)
        problems.extend(Problem(made.trial_id, f"its state: {what} is left out") for what in cut)
    return sorted(trials, key=lambda trial: trial.number)  # the file has them in no particular order


def _object(part: Any) -> dict[str, Any]:
    if not isinstance(part, str):
        raise ValueError("no JSON text")
    value = parse_json(part)
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return value


def _trial_of_state(
    folder: Folder, number: int, trial: dict[str, Any], run: dict[str, Any], cut: list[str]
) -> TrialRecord:
    trial_id = id_of(trial)
    name = text_or_none(trial.get("custom_trial_name"))
    name = name or f"{text_or_none(trial.get('trainable_name')) or 'trial'}_{trial_id}"
    # Before its first report, Tune has only the trial's names in it.
    last = run.get("last_result") if "training_iteration" in mapping(run.get("last_result")) else None
    config = plain(trial.get("config") or {}, cut)
    tag = str(trial.get("experiment_tag") or "").split("_", 1)[0]  # "12_lr=0.1": the twelfth after the first
    failures = run.get("num_failures")
    return TrialRecord(
        trial_id=trial_id,
        number=int(tag) if tag.isascii() and tag.isdigit() and len(tag) < 10 else number,
        name=name.replace("/", "_"),
        config=config if isinstance(config, dict) else {},
        status=text_or_none(trial.get("status")) or "UNKNOWN",
        directory=_directory(folder, folder_name_of(trial), cut),
        start_time=seconds(run.get("start_time")),
        end_time=seconds(run.get("last_result_time") or mapping(last).get("timestamp")) if last else None,
        last_result=mapping(plain(last, cut)) or None,
        num_failures=failures if isinstance(failures, int) and 0 <= failures < 2**31 else 0,
        error="" if run.get("error_filename") or run.get("error_file") else None,
    )


def _directory(folder: Folder, name: Any, cut: list[str]) -> str:
    """Return a trial's folder, which is directly below the experiment's."""
    if not name:
        return ""
    if not isinstance(name, str) or "/" in name or name in (".", "..") or "\0" in name:
        cut.append(f"the folder {str(name)[:100]!r}")
        return ""
    return folder.below(name).shown
