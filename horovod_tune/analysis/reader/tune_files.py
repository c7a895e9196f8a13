"""Reads the folder of a Tune experiment: finished, interrupted or still running.

With `trial_files.py` the only place that knows Tune's private files; checked against Ray 2.60.0. In the
experiment's folder that is `experiment_state-*.json` (every trial's state, as JSON within JSON). No pickle is
opened: `metadata.py` has what our driver wrote. A part that cannot be read costs that part and is named among
the record's problems.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import Any

from horovod_tune.analysis.reader.folders import Entry, Folder, driver_folders, shown_place
from horovod_tune.analysis.reader.metadata import metadata_of
from horovod_tune.analysis.reader.plain_values import mapping, parse_json, text_or_none
from horovod_tune.analysis.reader.records import ExperimentRecord, Problem, TrialRecord
from horovod_tune.analysis.reader.runs import STATE_PREFIX, STATE_SUFFIX, Run, StateFile, choose, runs_of
from horovod_tune.analysis.reader.trial_files import trials_of_state, with_files

_STATE = f"{STATE_PREFIX}*{STATE_SUFFIX}"
_UNFINISHED = ("PENDING", "RUNNING", "PAUSED")
_TRIAL_FILES = ("result.json", "params.json", "progress.csv")
_EQUAL = 4  # so many trials with the same problem make one line
_COPIED_S = 3600.0  # a file of a search is written at most so long after its trial has started
_READERS = 16  # storage in a cloud answers each request late; on a local disk it makes no difference


def result_of(returned: Any) -> tuple[Folder, tuple[str | None, str | None], frozenset[str] | None]:
    """Return folder, metric and mode, and trials of what `tune.run` or `Tuner.fit` returned.

    Raises `TypeError` for anything else.
    """
    got = type(returned).__name__
    returned = getattr(returned, "_experiment_analysis", returned)
    filesystem, path = getattr(returned, "_fs", None), getattr(returned, "_experiment_fs_path", None)
    if filesystem is None or not isinstance(path, str):
        raise TypeError(f"experiment must be a path, or what tune.run or Tuner.fit returned; got {got}")
    folder = Folder(filesystem, path, shown_place(filesystem, path))
    trials = getattr(returned, "trials", None)
    ids = frozenset(str(trial.trial_id) for trial in trials) if trials else None
    known = (getattr(returned, "default_metric", None), getattr(returned, "default_mode", None))
    return folder, known, ids


def read_experiment(
    folder: Folder, *, run: str | None = None, trial_ids: Collection[str] | None = None
) -> ExperimentRecord:
    """Read one search of an experiment's folder: the newest, the one named `run`, or that of `trial_ids`.

    Raises:
        ValueError: the folder holds no Tune experiment, or no such run.
    """
    problems: list[Problem] = []
    entries = _entries(folder, problems)
    runs = runs_of(_state_files(folder, entries, problems))
    chosen = choose(runs, run, trial_ids)
    others: frozenset[str] = frozenset().union(*(other.trial_ids for other in runs if other is not chosen))
    state = chosen.newest.state if chosen is not None else None
    # A state file that cannot be read is known only by its name: its driver may run here.
    names = [chosen.newest.name] if chosen is not None else [e.name for e in entries if _is_state(e)][-1:]
    staged = _staged(folder, names, state)
    if staged is not None:
        with suppress(ValueError, OSError):
            state = _state(staged, names[0])
    trials = trials_of_state(folder, state, problems)
    if chosen is None or chosen is runs[-1] or trial_ids is not None:
        taken = {trial.folder_name for trial in trials}.union(*(run.folder_names for run in runs))
        trials += _trials_without_state(folder, staged, entries, taken)
    if not trials and state is None:
        raise ValueError(_no_experiment(folder, entries, problems))
    with ThreadPoolExecutor(_READERS) as readers:
        read = list(readers.map(lambda trial: with_files(folder, staged, trial), trials))
    kept: list[Any] = []
    for trial, found in read:
        stray = trial.number < 0
        if trial.trial_id in others or (trial_ids is not None and trial.trial_id not in trial_ids):
            continue
        if stray and trial_ids is None and _is_older(trial, chosen):
            problems.append(Problem(trial.name, "belongs to a search that began earlier; it is left out"))
            continue
        kept.append(replace(trial, number=len(kept)) if stray else trial)
        problems.extend(found)
    for missing in sorted(set(trial_ids or ()) - {trial.trial_id for trial in kept}):
        problems.append(Problem(missing, "nothing of this trial is in the experiment's folder"))
    listed = [*entries, *(staged.entries() if staged is not None else ())]
    folders = [folder] if staged is None else [folder, staged]
    stamps = chosen.stamps if chosen is not None and len(runs) > 1 else {""}
    known = metadata_of(folders, listed, stamps, {trial.trial_id for trial in kept}, problems)
    # Tune's state has a metric only, and a mode counts only for its own metric.
    metric = text_or_none(mapping(mapping(state).get("runner_data")).get("_metric")) or known.get("metric")
    if known.get("mode") not in ("min", "max") or known.get("metric") not in (metric, None):
        known["mode"] = None
    if resources := known.pop("resources", ()):
        kept = [replace(trial, resources=resources) for trial in kept]
    is_copy = staged is None and chosen is not None and _is_copy(folder, entries, chosen, kept)
    if is_copy:
        modified = []
    elif chosen is not None and chosen is not runs[-1]:
        modified = [file.written for file in chosen.files]
    else:
        modified = [entry.modified for entry in listed if not entry.is_dir]
    sessions = chosen.sessions if chosen is not None else ()
    return ExperimentRecord(
        name=folder.name,
        path=folder.shown,
        run=chosen.name if chosen is not None else None,
        runs=tuple(run.name for run in runs),
        trials=tuple(kept),
        problems=tuple(_together(problems)),
        start_time=min((*sessions, *(trial.start_time for trial in kept if trial.start_time)), default=None),
        sessions=sessions,
        is_copy=is_copy,
        last_write=max(filter(None, (*modified, *(trial.end_time for trial in kept))), default=None),
        **(known | {"metric": metric}),
    )


def _together(problems: Iterable[Problem]) -> list[Problem]:
    """Make one line of what several trials have in common."""
    groups: dict[str, list[Problem]] = {}
    for problem in problems:
        groups.setdefault(problem.what, []).append(problem)
    found: list[Problem] = []
    for what, group in groups.items():
        if len(group) < _EQUAL:
            found += group
            continue
        names = ", ".join(problem.where for problem in group[:3])
        found.append(Problem(f"{len(group)} trials", f"{what} ({names} and {len(group) - 3} more)"))
    return found


def _entries(folder: Folder, problems: list[Problem]) -> list[Entry]:
    entries = folder.entries()
    for entry in entries:
        if entry.odd_name:
            problems.append(Problem(entry.name, "its name is not UTF-8; it is left out"))
    return [entry for entry in entries if not entry.odd_name]


def _is_state(entry: Entry) -> bool:
    return fnmatch.fnmatchcase(entry.name, _STATE)


def _state_files(folder: Folder, entries: Iterable[Entry], problems: list[Problem]) -> list[StateFile]:
    """Return the readable state files; a restored search, or several searches, have several."""
    found = []
    for entry in filter(_is_state, entries):
        try:
            found.append(StateFile(entry.name, _state(folder, entry.name), entry.modified))
        except (ValueError, OSError) as error:
            problems.append(Problem(entry.name, str(error)))
    return found


def _state(folder: Folder, name: str) -> dict[str, Any]:
    try:
        state = parse_json((folder.read(name) or b"").decode("utf-8", "replace"))
    except ValueError as error:
        raise ValueError(f"not readable as JSON ({error})") from error
    if not isinstance(state, dict):
        raise ValueError("holds no trials")
    if "trial_data" not in state and isinstance(state.get("checkpoints"), list):
        # Ray 1.x has all of a trial in one JSON text.
        state["trial_data"] = [[trial, trial] for trial in state["checkpoints"]]
    if not isinstance(state.get("trial_data"), list):
        raise ValueError("holds no trials")
    return state


def _staged(folder: Folder, names: Sequence[str], state: dict[str, Any] | None) -> Folder | None:
    """Return the driver's own copy of an unfinished experiment, if that driver ran on this machine."""
    if not names or (state is not None and not _unfinished(state)):
        return None
    for candidate in driver_folders(folder.name):
        try:
            if candidate.read(names[0]) is not None:  # the name has the moment the driver started
                return candidate
        except OSError:  # another user's search of the same name
            continue
    return None


def _unfinished(state: dict[str, Any]) -> bool:
    return not state["trial_data"] or any(
        isinstance(pair, list) and pair and f'"status": "{status}"' in str(pair[0])
        for status in _UNFINISHED
        for pair in state["trial_data"]
    )


def _trials_without_state(
    folder: Folder, staged: Folder | None, entries: Iterable[Entry], taken: Collection[str]
) -> list[TrialRecord]:
    """Return trials' folders that no state file names: it was lost, or is older than they are.

    Their number is not known yet: -1.
    """
    listed = [*entries, *(staged.entries() if staged is not None else ())]
    found: list[TrialRecord] = []
    for name in sorted({entry.name for entry in listed if entry.is_dir}.difference(taken)):
        places = [folder.below(name)] + ([staged.below(name)] if staged is not None else [])
        if not any(place.size(file) for place in places for file in _TRIAL_FILES):
            continue
        error = "" if any(place.size("error.txt") for place in places) else None
        found.append(TrialRecord(name, -1, name, {}, "UNKNOWN", folder.below(name).shown, error=error))
    return found


def _is_older(trial: TrialRecord, run: Run | None) -> bool:
    """Return True if a trial ended before the search began, so that it belongs to one whose state is lost."""
    began = run.sessions[0] if run is not None and run.sessions else -math.inf
    return trial.end_time is not None and trial.end_time < began - 1.0


def _no_experiment(folder: Folder, entries: Iterable[Entry], problems: Iterable[Problem]) -> str:
    unreadable = "; ".join(map(str, problems))
    if unreadable:
        return f"no Tune experiment can be read at {folder.shown!r}: {unreadable}"
    folders = [entry.name for entry in entries if entry.is_dir]
    inner = [name for name in folders if any(map(_is_state, folder.below(name).entries()))]
    hint = f"; it holds experiments of its own: {', '.join(inner[:5])}" if inner else ""
    missing = f"neither {_STATE} nor a trial's folder with result.json or progress.csv"
    return f"no Tune experiment at {folder.shown!r}: {missing}{hint}"


def _is_copy(folder: Folder, entries: Sequence[Entry], run: Run, trials: Iterable[TrialRecord]) -> bool:
    """Return True if no file is as old as the search: the folder is a copy, with other file times."""
    started = [trial for trial in trials if trial.status != "PENDING"][:3]
    inside = [folder.below(trial.folder_name).entries() for trial in started if trial.folder_name]
    written = [entry.modified for entry in chain(*inside, entries) if entry.modified and not entry.is_dir]
    began = run.newest.start_time
    return began is not None and bool(started and written) and min(written) > began + _COPIED_S
