"""The state files of an experiment, `experiment_state-<its driver's start>.json`: every trial's state.

A restored search writes a new state file, which has the earlier trials too. Another search of the same name
writes into the same folder, but its file has other trials. The format is JSON within JSON, private to Tune
(checked against Ray 2.60.0); what Tune could only write as a pickle is not read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from horovod_tune.analysis.reader.folders import Folder
from horovod_tune.analysis.reader.plain_values import mapping, parse_object, plain, seconds, text_or_none
from horovod_tune.analysis.reader.records import Problem, TrialRecord

_PREFIX, _SUFFIX = "experiment_state-", ".json"


def is_state(name: str) -> bool:
    return name.startswith(_PREFIX) and name.endswith(_SUFFIX)


@dataclass(frozen=True, eq=False)
class Run:
    """One search: `trials`, in the order of creation, are those of its newest state file.

    `files` are the names of its state files, oldest first, and `sessions` the Unix times in seconds at which
    their drivers started, as far as known. `earlier` are the trials as older files have them.
    """

    trials: tuple[TrialRecord, ...] = ()
    files: tuple[str, ...] = ()
    sessions: tuple[float, ...] = ()
    problems: tuple[Problem, ...] = ()
    metric: str | None = None
    earlier: tuple[TrialRecord, ...] = ()

    @property
    def stamps(self) -> list[str]:
        """Each driver's start time, as in the names of Tune's files."""
        return [name.removeprefix(_PREFIX).removesuffix(_SUFFIX) for name in self.files]

    @property
    def name(self) -> str | None:
        """What `analyze(…, run=name)` selects it by."""
        return self.stamps[0] if self.files else None

    @property
    def trial_ids(self) -> frozenset[str]:
        return frozenset(trial.trial_id for trial in (*self.trials, *self.earlier))

    def after(self, older: Run) -> Run:
        """Return the search to which the older state file, or files, belong too."""
        return replace(
            self,
            files=tuple(sorted((*older.files, *self.files))),
            sessions=tuple(sorted({*older.sessions, *self.sessions})),
            earlier=(*older.earlier, *older.trials, *self.earlier),
        )


def parse_state(data: bytes, name: str, folder: Folder) -> Run:
    """Read a state file; `folder` is the experiment's. Raises `ValueError` if it has no trials in JSON."""
    state = parse_object(data.decode("utf-8", "replace"))
    pairs = state.get("trial_data")
    if pairs is None and "checkpoints" in state:
        raise ValueError("written by Ray before 2.7: not read; its trials are read from their own folders")
    if not isinstance(pairs, list):
        raise ValueError("holds no trials")
    trials: list[TrialRecord] = []
    problems: list[Problem] = []
    for number, pair in enumerate(pairs):
        cut: dict[str, None] = {}  # each once: a hostile file has millions
        try:
            trial, run = map(parse_object, pair)
            trials.append(_trial(folder, number, plain(trial, cut.setdefault), run, cut.setdefault))
        except (ValueError, TypeError, KeyError) as error:
            what = f"{type(error).__name__}: {error}"[:300]
            problems.append(Problem(f"trial {number} of the state file", what))
            continue
        problems += [Problem(trials[-1].trial_id, f"its state: {what} is left out") for what in cut]
    trials.sort(key=lambda trial: trial.number)  # the file has them in no particular order
    runner, stats = mapping(state.get("runner_data")), mapping(state.get("stats"))
    # Tune writes the same time twice. A copy may have one of them changed.
    starts = (seconds(runner.get("_start_time")), seconds(stats.get("start_time")))
    started = sorted(filter(None, starts))[:1]
    metric = text_or_none(plain(runner.get("_metric")))
    return Run(tuple(trials), (name,), tuple(started), tuple(problems), metric)


def _trial(
    folder: Folder, number: int, trial: dict[str, Any], run: dict[str, Any], tell: Callable[[str], object]
) -> TrialRecord:
    trial_id = str(trial["trial_id"])[:300]
    name = text_or_none(trial.get("custom_trial_name"))
    name = name or f"{text_or_none(trial.get('trainable_name')) or 'trial'}_{trial_id}"
    # Before the first report, `last_result` has only the trial's names.
    told = mapping(plain(run.get("last_result"), tell))
    last = told if "training_iteration" in told else None
    tag = str(trial.get("experiment_tag") or "").split("_", 1)[0]  # "12_lr=0.1" has the trial's number
    failures = run.get("num_failures")
    place = trial.get("relative_logdir") or ""
    if not isinstance(place, str) or "/" in place or place in (".", "..") or "\0" in place:
        tell(f"the folder {str(place)[:100]!r}")
        place = ""
    return TrialRecord(
        trial_id=trial_id,
        number=int(tag) if tag.isascii() and tag.isdigit() and len(tag) < 10 else number,
        name=name.replace("/", "_"),
        config=mapping(trial.get("config")),
        status=text_or_none(trial.get("status")) or "UNKNOWN",
        directory=folder.below(place).shown if place else "",
        start_time=seconds(run.get("start_time")),
        end_time=seconds(run.get("last_result_time") or mapping(last).get("timestamp")) if last else None,
        last_result=last,
        num_failures=failures if isinstance(failures, int) and 0 <= failures < 2**31 else 0,
        error="" if run.get("error_filename") else None,
        stop=mapping(trial["stopping_criterion"]) if "stopping_criterion" in trial else None,
    )


def runs_of(states: Iterable[Run]) -> list[Run]:
    """Return the searches of single state files, in the order of their last drivers' starts.

    Two files belong to one search when they have a trial in common.
    """
    runs: list[Run] = []
    for newest in sorted(states, key=lambda state: state.files):
        same = [run for run in runs if run.trial_ids & newest.trial_ids]
        runs = [run for run in runs if run not in same]
        for run in same:
            newest = newest.after(run)
        runs.append(newest)
    return runs


def choose(runs: Sequence[Run], name: str | None = None, trial_ids: Collection[str] | None = None) -> Run:
    """Return the run `name`, or the one with most of `trial_ids`, or the newest; if there is none, `Run()`.

    Raises `ValueError` if no run has the name.
    """
    if name is not None:
        for run in runs:
            if name in run.stamps:
                return run
        names = ", ".join(str(run.name) for run in runs) or "none"
        raise ValueError(f"there is no run {name!r} in this experiment; its runs: {names}")
    if trial_ids is not None:
        runs = [run for run in runs if not run.trial_ids.isdisjoint(trial_ids)]
        return max(runs, key=lambda run: len(run.trial_ids.intersection(trial_ids)), default=Run())
    return runs[-1] if runs else Run()
