"""Reads what an experiment's state file says of each trial (JSON within JSON)."""

from __future__ import annotations

from typing import Any

from horovod_tune.analysis.reader.folders import Folder
from horovod_tune.analysis.reader.plain_values import mapping, parse_json, plain, text_or_none
from horovod_tune.analysis.reader.records import TRAINING_ITERATION, Problem, TrialRecord
from horovod_tune.analysis.reader.runs import folder_name_of, id_of
from horovod_tune.analysis.reader.tune_fields import seconds


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
    last = run.get("last_result") if TRAINING_ITERATION in mapping(run.get("last_result")) else None
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
    """A trial's folder, which is directly below the experiment's."""
    if not name:
        return ""
    if not isinstance(name, str) or "/" in name or name in (".", "..") or "\0" in name:
        cut.append(f"the folder {str(name)[:100]!r}")
        return ""
    return folder.below(name).shown
