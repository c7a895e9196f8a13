"""Which search of an experiment's folder is meant: a second one of the same name writes into the same folder.

Each driver writes `experiment_state-<its start>.json`. A restored search writes a new one that speaks of the
earlier trials too; a search that was started again lists other trials.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from horovod_tune.analysis.reader.plain_values import mapping, parse_json, plain, seconds, text_or_none

STATE_PREFIX, STATE_SUFFIX = "experiment_state-", ".json"


def id_of(trial: dict[str, Any]) -> str:
    """Return a trial's id in its state. Raises `KeyError` if it has none."""
    return text_or_none(trial["trial_id"]) or str(plain(trial["trial_id"]))[:300]


def folder_name_of(trial: dict[str, Any]) -> str:
    """Return the folder's name in a trial's state, or "". Ray 1.x wrote the whole path."""
    name = trial.get("relative_logdir") or str(trial.get("logdir") or "").rstrip("/").rsplit("/", 1)[-1]
    return name if isinstance(name, str) else ""


@dataclass(frozen=True)
class StateFile:
    """One driver's record of its search. `written` is Unix time in seconds, None if it is not known."""

    name: str
    state: dict[str, Any]
    written: float | None = None

    @property
    def stamp(self) -> str:
        """When its driver started, as Tune writes it into the names of its files."""
        return self.name.removeprefix(STATE_PREFIX).removesuffix(STATE_SUFFIX)

    @cached_property
    def trials(self) -> dict[str, str]:
        """The trials in it: the name of each one's folder, by trial_id."""
        found = {}
        for pair in self.state["trial_data"]:
            try:
                trial = mapping(parse_json(pair[0]))
                found[id_of(trial)] = folder_name_of(trial)
            except (ValueError, TypeError, KeyError, IndexError):
                continue  # the reader of trials names it
        return found

    @property
    def start_time(self) -> float | None:
        """When its driver started, in Unix time (seconds)."""
        runner, stats = mapping(self.state.get("runner_data")), mapping(self.state.get("stats"))
        start = seconds(runner.get("_start_time"))
        return seconds(stats.get("start_time")) if start is None else start


@dataclass(frozen=True)
class Run:
    """One search: its state files, the newest first, and the trials in any of them."""

    files: tuple[StateFile, ...]
    trial_ids: frozenset[str]

    @property
    def folder_names(self) -> set[str]:
        return {name for file in self.files for name in file.trials.values() if name}

    @property
    def name(self) -> str:
        """When its first driver started: what `analyze(…, run=…)` takes."""
        return self.files[-1].stamp

    @property
    def newest(self) -> StateFile:
        return self.files[0]

    @property
    def stamps(self) -> frozenset[str]:
        return frozenset(file.stamp for file in self.files)

    @property
    def sessions(self) -> tuple[float, ...]:
        """When each of its drivers started, in Unix time (seconds), the first one first."""
        return tuple(sorted({file.start_time for file in self.files if file.start_time is not None}))


def runs_of(files: Iterable[StateFile]) -> list[Run]:
    """Return the searches that have state files, the oldest first.

    Two files belong to one search when they have a trial in common.
    """
    runs: list[Run] = []
    for file in sorted(files, key=lambda file: file.name):
        ids = frozenset(file.trials)
        same = [run for run in runs if run.trial_ids & ids]
        joined = sorted((file, *(f for run in same for f in run.files)), key=lambda f: f.name, reverse=True)
        runs = [run for run in runs if run not in same]
        runs.append(Run(tuple(joined), frozenset(ids.union(*(run.trial_ids for run in same)))))
    return sorted(runs, key=lambda run: run.newest.name)


def choose(
    runs: Sequence[Run], name: str | None = None, trial_ids: Collection[str] | None = None
) -> Run | None:
    """Return the run of that name, or that of these trials, or the newest; None if there is none.

    Raises `ValueError` for a name that no run has.
    """
    if name is not None:
        for run in runs:
            if name == run.name or name in run.stamps:
                return run
        known = ", ".join(run.name for run in runs) or "none"
        raise ValueError(f"there is no run {name!r} in this experiment; its runs: {known}")
    if trial_ids is not None:
        of_these = [run for run in runs if run.trial_ids & set(trial_ids)]
        return max(of_these, key=lambda run: len(run.trial_ids & set(trial_ids)), default=None)
    return runs[-1] if runs else None
