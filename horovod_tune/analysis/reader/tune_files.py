"""Reads the folder of a Tune experiment: finished, interrupted or still running.

A part that cannot be read is left out and listed in the record's `problems`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import chain

from horovod_tune.analysis.reader.folders import Entry, Folder, driver_folders
from horovod_tune.analysis.reader.metadata_files import metadata_of
from horovod_tune.analysis.reader.records import ExperimentRecord, Problem, TrialRecord
from horovod_tune.analysis.reader.state_files import Run, choose, is_state, parse_state, runs_of
from horovod_tune.analysis.reader.trial_files import with_files

_TRIAL_FILES = ("result.json", "params.json", "progress.csv")
_ENDED = ("TERMINATED", "ERROR")
_EQUAL = 4  # this many trials with the same problem share one line
_COPIED_S = 3600.0  # a search writes its first file within this time of its driver's start
_READERS = 16  # threads: each request to cloud storage has a high latency (a local disk needs only one)


def read_experiment(
    folder: Folder, *, run: str | None = None, trial_ids: Collection[str] | None = None
) -> ExperimentRecord:
    """Read one search of an experiment's folder: the newest, the one named `run`, or that of `trial_ids`.

    Raises:
        ValueError: the folder contains no Tune experiment, or no such run.
    """
    problems: list[Problem] = []
    entries = folder.entries()
    problems += [Problem(e.name, "its name is not UTF-8; it is left out") for e in entries if e.odd_name]
    entries = [entry for entry in entries if not entry.odd_name]
    runs = runs_of(_state_files(folder, entries, problems))
    chosen = choose(runs, run, trial_ids)
    others = [other for other in runs if other is not chosen]
    other_files = {name for other in others for name in other.files}
    # A state file's name leads to its driver's staged copy on this machine, even if the file cannot be read.
    names = chosen.files or sorted(filter(is_state, (entry.name for entry in entries)))
    folder, state = _with_staged(folder, names[-1] if names else "", chosen)
    if folder.staged is not None:
        entries = [entry for entry in folder.entries() if not entry.odd_name]
    trials = list(state.trials)
    problems += state.problems
    if run is None or chosen is runs[-1]:
        with_state = chain(trials, *((*one.trials, *one.earlier) for one in runs))
        trials += _trials_without_state(folder, entries, {trial.folder_name for trial in with_state})
    if not trials and not state.files:
        raise ValueError(_no_experiment(folder, entries, problems))
    with ThreadPoolExecutor(_READERS) as readers:
        read = list(readers.map(lambda trial: with_files(folder, trial), trials))
    kept = _of_search(read, chosen, others, trial_ids, problems)
    ids = {trial.trial_id for trial in kept}
    for missing in sorted(set(trial_ids or ()) - ids):
        problems.append(Problem(missing, "nothing of this trial is in the experiment's folder"))
    stamps = chosen.stamps if others else [""]
    facts = metadata_of(folder, {entry.name for entry in entries}, stamps, ids, problems)
    # Tune's state has a metric but no mode; a recorded mode counts only for its own metric.
    metric = state.metric or facts.get("metric")
    if facts.get("mode") not in ("min", "max") or facts.get("metric") not in (metric, None):
        facts["mode"] = None
    resources, ends = facts.pop("resources", ()), facts.pop("ends", {})
    if resources or ends:
        stops = [None if trial.stop is None else trial.stop | ends for trial in kept]
        kept = [replace(t, resources=resources, stop=stop) for t, stop in zip(kept, stops, strict=True)]
    # A driver writes its state all the time; other files may be the user's, such as a report.
    modified = [e.modified for e in entries if is_state(e.name) and e.name not in other_files]
    if folder.staged is None and _is_copy(folder, entries, chosen, kept):
        modified = []
    return ExperimentRecord(
        name=folder.name,
        path=folder.shown,
        run=chosen.name,
        runs=tuple(str(run.name) for run in runs),
        trials=tuple(kept),
        problems=tuple(_together(problems)),
        start_time=min(filter(None, (*chosen.sessions, *(trial.start_time for trial in kept))), default=None),
        sessions=chosen.sessions,
        last_write=max(filter(None, (*modified, *(trial.end_time for trial in kept))), default=None),
        **(facts | {"metric": metric}),
    )


def _of_search(
    read: Iterable[tuple[TrialRecord, list[Problem]]],
    chosen: Run,
    others: Iterable[Run],
    trial_ids: Collection[str] | None,
    problems: list[Problem],
) -> list[TrialRecord]:
    """Return the trials of the chosen search, each once, and add their problems to `problems`."""
    kept: list[TrialRecord] = []
    began = min(chosen.sessions, default=-math.inf)
    theirs = {trial_id for other in others for trial_id in other.trial_ids}
    places: dict[str, int] = {}
    for trial, its_problems in read:
        stray = trial.number < 0
        if trial.trial_id in theirs or (trial_ids is not None and trial.trial_id not in trial_ids):
            continue
        if stray and trial_ids is None and (trial.end_time or math.inf) < began - 1.0:
            problems.append(Problem(trial.name, "belongs to a search that began earlier; it is left out"))
            continue
        if (place := places.setdefault(trial.trial_id, len(kept))) < len(kept):
            twin = kept[place]
            use = "left out" if twin.rows else "used"
            problems.append(Problem(trial.name, f"a second folder of trial {trial.trial_id}; it is {use}"))
            if not twin.rows:
                kept[place] = replace(twin, rows=trial.rows, directory=trial.directory, error=trial.error)
            continue
        kept.append(replace(trial, number=len(kept)) if stray else trial)
        problems += its_problems
    return kept


def _together(problems: Iterable[Problem]) -> list[Problem]:
    """Merge the problems that several trials have in common."""
    groups: dict[str, list[Problem]] = {}
    for problem in dict.fromkeys(problems):
        groups.setdefault(problem.what, []).append(problem)
    merged: list[Problem] = []
    for what, group in groups.items():
        if len(group) < _EQUAL:
            merged += group
            continue
        names = ", ".join(problem.where for problem in group[:3])
        merged.append(Problem(f"{len(group)} trials", f"{what} ({names} and {len(group) - 3} more)"))
    return merged


def _state_files(folder: Folder, entries: Iterable[Entry], problems: list[Problem]) -> list[Run]:
    """Return the readable state files; each driver that wrote into the folder has its own."""
    states = []
    for entry in entries:
        if is_state(entry.name):
            try:
                data = folder.read(entry.name) or b""
                states.append(parse_state(data, entry.name, folder))
            except (ValueError, OSError) as error:
                problems.append(Problem(entry.name, str(error)))
    return states


def _with_staged(folder: Folder, name: str, state: Run) -> tuple[Folder, Run]:
    """Return the folder with its driver's staged copy, and the state that is there.

    Both are unchanged if the copy has no more than the storage, or its driver did not run on this machine.
    """
    for candidate in driver_folders(folder.name) if name else ():
        with suppress(OSError):  # another user's search of the same name
            data = candidate.read(name)  # the name has the driver's start time
            newer = state
            with suppress(ValueError):  # half-written
                newer = parse_state(data or b"", name, folder)
            # Another search may have begun in the same second.
            same = not state.trials or not state.trial_ids.isdisjoint(newer.trial_ids)
            # Between two trials of a running search, all trials of the storage's state may have ended.
            ended = bool(state.trials) and all(trial.status in _ENDED for trial in state.trials)
            if data is not None and same and not (ended and newer.trials == state.trials):
                return replace(folder, staged=candidate), newer
    return folder, state


def _trials_without_state(
    folder: Folder, entries: Iterable[Entry], taken: Collection[str]
) -> list[TrialRecord]:
    """Return the trials that no state file names, as theirs was lost or is older; their `number` is -1."""
    strays: list[TrialRecord] = []
    for name in sorted({entry.name for entry in entries if entry.is_dir}.difference(taken)):
        place = folder.below(name)
        files = {entry.name for entry in place.entries()}
        if not files.isdisjoint(_TRIAL_FILES):
            error = "" if "error.txt" in files else None
            strays.append(TrialRecord(name, -1, name, {}, "UNKNOWN", place.shown, error=error))
    return strays


def _no_experiment(folder: Folder, entries: Iterable[Entry], problems: Iterable[Problem]) -> str:
    unreadable = "; ".join(map(str, problems))
    if unreadable:
        return f"no Tune experiment can be read at {folder.shown!r}: {unreadable}"
    folders = [entry.name for entry in entries if entry.is_dir]
    inner = [name for name in folders if any(is_state(e.name) for e in folder.below(name).entries())]
    hint = f"; it contains experiments: {', '.join(inner[:5])}" if inner else ""
    if not {entry.name for entry in entries}.isdisjoint(_TRIAL_FILES):
        hint = "; it is a trial's own folder: pass the folder that contains it"
    missing = "neither experiment_state-*.json nor a trial's folder with result.json or progress.csv"
    return f"no Tune experiment at {folder.shown!r}: {missing}{hint}"


def _is_copy(folder: Folder, entries: Sequence[Entry], run: Run, trials: Iterable[TrialRecord]) -> bool:
    """Return True if no file is as old as the search: the folder is a copy, with other file times."""
    started = [trial for trial in trials if trial.status != "PENDING"][:3]
    inside = [folder.below(trial.folder_name).entries() for trial in started if trial.folder_name]
    written = [entry.modified for entry in chain(*inside, entries) if entry.modified and not entry.is_dir]
    return bool(run.sessions and started and written) and min(written) > run.sessions[-1] + _COPIED_S
