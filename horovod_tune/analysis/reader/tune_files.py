"""Reads the folder of a Tune experiment: finished, interrupted or still running.

With `trial_files.py` and `tune_pickles.py` the only place that knows Tune's private files; checked against
Ray 2.60.0. In the experiment's folder these are `experiment_state-*.json` (every trial's state, as JSON
within JSON), `tuner.pkl` and the searcher's state. A part that cannot be read costs that part and is named
among the record's problems.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from horovod_tune.analysis.reader.folders import Entry, Folder, driver_folders
from horovod_tune.analysis.reader.records import ExperimentRecord, Problem, TrialRecord
from horovod_tune.analysis.reader.trial_files import with_files
from horovod_tune.analysis.reader.tune_fields import seconds
from horovod_tune.analysis.reader.tune_pickles import (
    TunerFacts,
    plain,
    resources_of,
    searcher_facts,
    tuner_facts,
)

FACTS_FILE = "horovod_tune_run.json"  # written by our progress callback
_STATE, _SEARCHERS = (
    "experiment_state-*.json",
    ("basic-variant-state-*", "search_gen_state-*", "searcher-state-*"),
)
_UNFINISHED = ("PENDING", "RUNNING", "PAUSED")
_READERS = 16  # storage in a cloud answers each request late; a local disk does not mind


def folder_of(result: Any) -> Folder | None:
    """The folder of what `tune.run` or `Tuner.fit` returned; None for anything else."""
    result = getattr(result, "_experiment_analysis", result)
    filesystem, path = getattr(result, "_fs", None), getattr(result, "_experiment_fs_path", None)
    if filesystem is None or not isinstance(path, str):
        return None
    remote = filesystem.type_name not in ("local", "subtree")
    return Folder(filesystem, path, f"{filesystem.type_name}://{path}" if remote else path)


def metric_of(result: Any) -> tuple[str | None, str | None]:
    """The metric and mode that such a result was given."""
    result = getattr(result, "_experiment_analysis", result)
    return getattr(result, "default_metric", None), getattr(result, "default_mode", None)


def read_experiment(folder: Folder) -> ExperimentRecord:
    """Read everything there is in an experiment's folder.

    Raises `ValueError` where the folder holds no Tune experiment.
    """
    problems: list[Problem] = []
    entries = folder.entries()
    state_name, state = _newest_state(folder, entries, problems)
    staged = _staged(folder, state_name, state)
    if staged is not None:
        state = _later(state, staged, state_name)
    trials = _trials_of_state(folder, state, problems)
    trials += _trials_without_state(folder, staged, entries, trials)
    if not trials and state is None:
        inner = [
            entry.name for entry in entries if entry.is_dir and _holds_experiment(folder.below(entry.name))
        ]
        hint = f"; it holds experiments of its own: {', '.join(inner[:5])}" if inner else ""
        raise ValueError(
            f"no Tune experiment at {folder.shown!r}: "
            f"neither {_STATE} nor a trial's folder with result.json{hint}"
        )
    with ThreadPoolExecutor(_READERS) as readers:
        read = list(readers.map(lambda trial: with_files(folder, staged, trial), trials))
    for _, found in read:
        problems.extend(found)
    return _assemble(folder, entries, state, staged, tuple(trial for trial, _ in read), problems)


def _newest_state(
    folder: Folder, entries: Iterable[Entry], problems: list[Problem]
) -> tuple[str | None, dict[str, Any] | None]:
    """The newest state file that can be read; a restored experiment has several."""
    names = sorted((e.name for e in entries if fnmatch.fnmatch(e.name, _STATE)), reverse=True)
    for name in names:
        try:
            state = json.loads(folder.read(name) or b"")
            if isinstance(state, dict) and isinstance(state.get("trial_data"), list):
                return name, state
            problems.append(Problem(name, "holds no trials"))
        except ValueError as error:
            problems.append(Problem(name, f"not readable as JSON ({error})"))
    return (names[0] if names else None), None


def _staged(folder: Folder, state_name: str | None, state: dict[str, Any] | None) -> Folder | None:
    """The driver's own copy of an unfinished experiment, if that driver ran on this machine."""
    if state_name is None or (state is not None and not _unfinished(state)):
        return None
    for candidate in driver_folders(folder.name):
        try:
            if candidate.read(state_name) is not None:  # the name has the moment the driver started
                return candidate
        except PermissionError:  # another user's search of the same name
            continue
    return None


def _unfinished(state: dict[str, Any]) -> bool:
    return not state["trial_data"] or any(
        any(f'"status": "{status}"' in str(pair[0]) for status in _UNFINISHED) for pair in state["trial_data"]
    )


def _later(state: dict[str, Any] | None, staged: Folder, name: str | None) -> dict[str, Any] | None:
    try:
        other = json.loads(staged.read(name or "") or b"")
    except ValueError:
        return state
    if not isinstance(other, dict) or not isinstance(other.get("trial_data"), list):
        return state
    return other if state is None or _steps(other) >= _steps(state) else state


def _steps(state: dict[str, Any]) -> float:
    return (state.get("runner_data") or {}).get("_iteration") or 0


def _trials_of_state(
    folder: Folder, state: dict[str, Any] | None, problems: list[Problem]
) -> list[TrialRecord]:
    trials = []
    for number, pair in enumerate((state or {}).get("trial_data", [])):
        try:
            trials.append(_trial_of_state(folder, number, json.loads(pair[0]), json.loads(pair[1])))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            problems.append(Problem(f"trial {number} of the state file", f"{type(error).__name__}: {error}"))
    return sorted(trials, key=lambda trial: trial.number)  # the file has them in no particular order


def _trial_of_state(folder: Folder, number: int, trial: dict[str, Any], run: dict[str, Any]) -> TrialRecord:
    trial_id = str(trial["trial_id"])
    name = trial.get("custom_trial_name") or f"{trial['trainable_name']}_{trial_id}"
    directory = trial.get("relative_logdir")
    last = run.get("last_result")
    tag = str(trial.get("experiment_tag") or "").split("_", 1)[0]  # "12_lr=0.1": the twelfth after the first
    return TrialRecord(
        trial_id=trial_id,
        number=int(tag) if tag.isdigit() else number,
        name=name.replace("/", "_"),
        config=plain(trial.get("config") or {}),
        status=trial["status"],
        directory=folder.below(directory).shown if directory else "",
        start_time=seconds(run.get("start_time")),
        end_time=seconds(run.get("last_result_time")) if last else None,
        last_result=plain(last) if last else None,
        num_failures=run.get("num_failures") or 0,
        error="" if run.get("error_filename") else None,
        resources=resources_of(trial.get("placement_group_factory")),
        checkpoint_blob=_blob(run.get("checkpoint_manager")),
    )


def _blob(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("value")
    return value if isinstance(value, str) else None


def _trials_without_state(
    folder: Folder, staged: Folder | None, entries: Iterable[Entry], known: list[TrialRecord]
) -> list[TrialRecord]:
    """Trials' folders that no state file speaks of: it was lost, or is older than they are."""
    taken = {trial.folder_name for trial in known}
    listed = [*entries, *(staged.entries() if staged is not None else ())]
    found: list[TrialRecord] = []
    for name in sorted({entry.name for entry in listed if entry.is_dir} - taken):
        places = [folder.below(name)] + ([staged.below(name)] if staged is not None else [])
        if not any(place.size(file) for place in places for file in ("result.json", "params.json")):
            continue
        failed = any(place.size("error.txt") for place in places)
        found.append(
            TrialRecord(
                trial_id=name,
                number=len(known) + len(found),
                name=name,
                config={},
                status="UNKNOWN",
                directory=folder.below(name).shown,
                error="" if failed else None,
            )
        )
    return found


def _assemble(
    folder: Folder,
    entries: list[Entry],
    state: dict[str, Any] | None,
    staged: Folder | None,
    trials: tuple[TrialRecord, ...],
    problems: list[Problem],
) -> ExperimentRecord:
    runner = (state or {}).get("runner_data") or {}
    facts = _tuner(folder, staged, entries, problems)
    written = _written_facts(folder, staged, problems)
    metric, mode = facts.metric or runner.get("_metric") or written.get("metric"), facts.mode
    if mode is None and metric is not None and metric == written.get("metric"):
        mode = written.get("mode") if written.get("mode") in ("min", "max") else None
    modified = [entry.modified for entry in entries if entry.modified and not entry.is_dir]
    modified += [trial.end_time for trial in trials if trial.end_time]
    if staged is not None:
        modified += [entry.modified for entry in staged.entries() if entry.modified]
    starts = [trial.start_time for trial in trials if trial.start_time]
    return ExperimentRecord(
        name=folder.name,
        path=folder.shown,
        trials=trials,
        problems=tuple(problems),
        metric=metric,
        mode=mode,
        start_time=seconds(runner.get("_start_time")) or (min(starts) if starts else None),
        total_time_s=seconds(runner.get("_total_time")),
        last_write=max(modified, default=None),
        num_samples=facts.num_samples,
        domains=facts.domains,
        constants=facts.constants,
        searcher=facts.searcher,
        scheduler=facts.scheduler,
        rungs=facts.rungs,
        time_budget_s=facts.time_budget_s,
        facts=written,
    )


def _tuner(
    folder: Folder, staged: Folder | None, entries: list[Entry], problems: list[Problem]
) -> TunerFacts:
    facts, searchers = TunerFacts(), TunerFacts()
    names = {entry.name for entry in entries}
    if staged is not None:
        names |= {entry.name for entry in staged.entries()}

    def add(name: str, known: TunerFacts, read: Callable[[bytes], TunerFacts]) -> None:
        try:
            known.add(read(folder.read(name) or (staged.read(name) if staged else None) or b""))
        except ValueError as error:
            problems.append(Problem(name, f"not readable ({error})"))

    for pattern in _SEARCHERS:
        for name in sorted(fnmatch.filter(names, pattern), reverse=True)[:1]:
            add(name, searchers, searcher_facts)
    facts.num_samples = searchers.num_samples  # it has counted the grid's points too, tuner.pkl has not
    if "tuner.pkl" in names:
        add("tuner.pkl", facts, tuner_facts)
    facts.add(searchers)
    return facts


def _written_facts(folder: Folder, staged: Folder | None, problems: list[Problem]) -> dict[str, Any]:
    data = folder.read(FACTS_FILE) or (staged.read(FACTS_FILE) if staged else None)
    if data is None:
        return {}
    try:
        facts = json.loads(data)
        return facts if isinstance(facts, dict) else {}
    except ValueError as error:
        problems.append(Problem(FACTS_FILE, f"not readable ({error})"))
        return {}


def _holds_experiment(folder: Folder) -> bool:
    return any(fnmatch.fnmatch(entry.name, _STATE) for entry in folder.entries())
