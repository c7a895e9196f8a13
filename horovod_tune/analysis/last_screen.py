"""What stands on the screen when a search has ended: its best trial, its failures, and where to see more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from horovod_tune.analysis.dominance import non_dominated
from horovod_tune.analysis.limits import Limit, kept
from horovod_tune.analysis.progress_state import Progress
from horovod_tune.analysis.reader.tune_pickles import TunerFacts, searcher_facts
from horovod_tune.analysis.scoring import Score, best_index, value_of
from horovod_tune.analysis.trial_facts import error_line

# Of more failures than these the screen shows only the number.
_FAILURES = 5


def searched_for(state_folder: str) -> TunerFacts:
    """Return what `BayesOptSearch` has left in a folder of the driver: its limits and its several metrics."""
    states = sorted(Path(state_folder).glob("searcher-state-*"), reverse=True)
    try:
        return searcher_facts(states[0].read_bytes()) if states else TunerFacts()
    except (OSError, ValueError):  # the same file is a problem that `analyze` names
        return TunerFacts()


def last_screen(
    progress: Progress, folder: str, trials: Sequence[Any], aims: TunerFacts | None = None
) -> str:
    """Return the last screen of a search.

    The best trial is that of ``results.best_config`` and `analyze`: trials are compared by their last values.

    Args:
        progress: what is known of the search.
        folder: where its results lie.
        trials: Tune's trials.
        aims: the limits that a result has to keep to be the best, and the metrics of a front.
    """
    aims = aims or TunerFacts()
    found = _front(trials, aims) if aims.front else _best(progress, trials, aims.limits)
    rows = [*found, ("results", folder)]
    more = "" if aims.front or progress.metric else " --metric NAME --mode min|max"
    rows += [
        ("see more", f"horovod-tune show {folder}{more}"),
        ("", f"horovod-tune report {folder} -o report.html{more}"),
        ("", f"in Python: horovod_tune.analyze({folder!r})"),
    ]
    return "\n".join([*_failures(trials), *(f"{name:13}{text}" for name, text in rows)])


def _keeping(trials: Sequence[Any], limits: Sequence[Limit]) -> list[Any]:
    """Return the trials whose last report keeps the limits."""
    return [trial for trial in trials if kept([trial.last_result or {}], limits)[0]]


def _front(trials: Sequence[Any], aims: TunerFacts) -> list[tuple[str, str]]:
    """Return how many results no other one beats, and how to see them."""
    results = [trial.last_result or {} for trial in _keeping(trials, aims.limits)]
    values = [[value_of(result, name) for name in aims.front] for result in results]
    array = np.array(values, dtype=float).reshape(len(values), len(aims.front))
    number = int(non_dominated(array, list(aims.front.values())).sum())
    within = f" within {' and '.join(map(str, aims.limits))}" if aims.limits else ""
    text = (
        f"{number} of {len(trials)} trials are beaten by no other one in {' and '.join(aims.front)}{within}"
    )
    return [("best trials", text), ("", "which: horovod_tune.analyze(...).pareto_front()")]


def _best(progress: Progress, trials: Sequence[Any], limits: Sequence[Limit]) -> list[tuple[str, str]]:
    known = list(progress.trials.values())
    if limits:
        keeping = {trial.trial_id for trial in _keeping(trials, limits)}
        known = [each for each in known if each.trial_id in keeping]
    scores = [Score(each.values[-1] if each.values else math.nan, each.best, None, None) for each in known]
    index = best_index(scores, progress.mode, "last") if progress.mode is not None else None
    within = " and ".join(map(str, limits))
    if index is None:
        return [("best trial", f"none: no trial's last report keeps {within}")] if limits else []
    best = known[index]
    text = f"{best.trial_id}, {progress.metric} {best.values[-1]:.6g} at its last report"
    rows = [("best trial", f"{text}, within {within}" if limits else text)]
    if not limits and progress.best_value != best.values[-1]:
        of = "its own" if progress.best_trial == best.trial_id else f"of {progress.best_trial}"
        rows.append(("", f"(the best {progress.metric} of any report was {progress.best_value:.6g}, {of})"))
    config = next((each.config for each in trials if each.trial_id == best.trial_id), best.config)
    return [*rows, ("best config", repr(config))]


def _failures(trials: Sequence[Any]) -> list[str]:
    failed = [trial for trial in trials if trial.status == "ERROR" and trial.error_file]
    lines = [f"{each.trial_id} failed: {_last_error(each.error_file)}" for each in failed[:_FAILURES]]
    if len(failed) > _FAILURES:
        lines.append(f"and {len(failed) - _FAILURES} more failed")
    # Where Tune copies it to: the file that it writes first lies in Ray's temporary directory.
    return [*lines, f"{'':13}(in full: {failed[0].storage.trial_fs_path}/error.txt)"] if failed else []


def _last_error(path: str) -> str:
    try:
        return error_line(Path(path).read_text(errors="replace")) or "no error message"
    except OSError:
        return "its error file cannot be read"
