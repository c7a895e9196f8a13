"""The text printed when a search has ended: its best trial, its failures, and how to see more."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from pyarrow.fs import FileType

from horovod_tune.analysis.reader.folders import has_uri, shown_place
from horovod_tune.analysis.reader.metadata_files import searcher_metadata
from horovod_tune.analysis.reader.plain_values import TUNES_OWN
from horovod_tune.analysis.search_progress import Progress
from horovod_tune.analysis.trial_details import error_line
from horovod_tune.scoring import kept, non_dominated, value_of

# At most this many failures are printed; the others are only counted.
_FAILURES = 5
# A configuration with data in it, such as a list of files, would push everything else off the screen.
_LONGEST_CONFIG = 10_000


def last_screen(trials: Sequence[Any], progress: Progress) -> str:
    """Return the text that is printed when a search has ended.

    The best trial is the one that `results.best_config` and `analyze` select, by last reported values: within
    the limits of `BayesOptSearch`, or on the Pareto front of its metrics.

    Args:
        trials: all of Tune's trials, including those that had ended before the search was resumed.
        progress: the metric, the mode, and the best value of any report.
    """
    metadata: dict[str, Any] = {}
    states = sorted(Path(trials[0].storage.experiment_driver_staging_path).glob("searcher-state-*"))
    with suppress(OSError, TypeError, ValueError):  # `analyze` reports the problem
        metadata = searcher_metadata(states[-1].read_bytes()) if states else {}
    limits, front = metadata.get("limits", ()), metadata.get("front")
    filesystem, path = trials[0].storage.storage_filesystem, str(trials[0].storage.experiment_fs_path)
    folder = shown_place(filesystem, path)
    keeping = [trial for trial in trials if kept([_last_known(trial)], limits)[0]]
    within = " and ".join(map(str, limits))
    if front:
        best = _front(keeping, len(trials), front, f" within {within}" if within else "")
    else:
        best = _best(keeping, progress, within)
    name = "NAME"
    if not front and progress.metric is None:
        numbers = dict.fromkeys(name for trial in trials for name in trial.metric_analysis)
        reported = [name for name in numbers if name not in TUNES_OWN]
        name = reported[0] if len(reported) == 1 else name
        names = f" (reported: {', '.join(reported[:8])})" if len(reported) > 1 else ""
        best = [("best trial", f'not known: write metric="{name}" and mode="min" or "max"{names}')]
    rows = [*best, ("results", folder)]
    if progress.count("interrupted", "paused", "restarting", "waiting"):
        has_tuner = filesystem.get_file_info(f"{path}/tuner.pkl").type == FileType.File
        again = f"tune.Tuner.restore({folder!r}, trainable).fit()"
        if not has_tuner:
            place, _, experiment = folder.rpartition("/")
            again = f"tune.run(trainable, name={experiment!r}, storage_path={place!r}, resume=True)"
        rows.append(("to continue", again))
    if filesystem.type_name == "local" or has_uri(filesystem):
        more = "" if front or progress.metric else f" --metric {shlex.quote(name)} --mode min|max"
        rows.append(("see more", f"horovod-tune show {shlex.quote(folder)}{more}"))
        rows.append(("", f"horovod-tune report {shlex.quote(folder)} -o report.html{more}"))
        rows.append(("", f"in Python: horovod_tune.analyze({folder!r})"))
    else:
        rows.append(("see more", f"in Python: horovod_tune.analyze({folder!r}, filesystem=…)"))
    return "\n".join([*_failures(trials), *(f"{name:13}{text}" for name, text in rows)])


def _last_known(trial: Any) -> dict[str, Any]:
    """Return each metric's last reported value; a report may lack some metrics."""
    lasts = {name: values["last"] for name, values in trial.metric_analysis.items()}
    return (trial.last_result or {}) | lasts


def _front(trials: Sequence[Any], among: int, modes: dict[str, str], within: str) -> list[tuple[str, str]]:
    values = [[value_of(_last_known(trial), name) for name in modes] for trial in trials]
    array = np.array(values, dtype=float).reshape(len(values), len(modes))
    number = int(non_dominated(array, list(modes.values())).sum())
    text = f"{number} of {among} trials are on the Pareto front of {' and '.join(modes)}{within}"
    return [("best trials", text), ("", "list them: horovod_tune.analyze(...).pareto_front()")]


def _best(trials: Sequence[Any], progress: Progress, within: str) -> list[tuple[str, str]]:
    metric = progress.metric
    scored = [(value_of(_last_known(trial), metric), trial) for trial in trials] if metric is not None else []
    finite = [(value, trial) for value, trial in scored if value is not None and math.isfinite(value)]
    if not finite:
        if not within:
            return [("best trial", f"none: no trial has reported a finite {metric}")] if metric else []
        of = f" has a finite {metric} and" if metric else ""
        return [("best trial", f"none: no trial's last report{of} meets {within}")]
    value, best = (max if progress.mode == "max" else min)(finite, key=itemgetter(0))
    digits = progress.digits
    text = f"{best.trial_id}, {metric} {value:.{digits}g} at its last report"
    rows = [("best trial", f"{text}, within {within}" if within else text)]
    if not within and progress.best_value != value:
        of = "from this trial" if progress.best_trial == best.trial_id else f"from {progress.best_trial}"
        rows.append(("", f"(the best {metric} in any report was {progress.best_value:.{digits}g}, {of})"))
    config = repr((best.last_result or {}).get("config") or best.config)
    if len(config) > _LONGEST_CONFIG:
        config = f"{len(config)} characters long: print horovod_tune.analyze(...).best_config"
    return [*rows, ("best config", config)]


def _failures(trials: Sequence[Any]) -> list[str]:
    failed = [trial for trial in trials if trial.status == "ERROR" and trial.error_file]
    lines = [f"{each.trial_id} failed: {_error_of(each.error_file)}" for each in failed[:_FAILURES]]
    if len(failed) > _FAILURES:
        lines.append(f"and {len(failed) - _FAILURES} more failed")
    # The text names the copy in Tune's storage: the original is in Ray's temporary directory.
    if failed:
        storage = failed[0].storage
        place = shown_place(storage.storage_filesystem, f"{storage.trial_fs_path}/error.txt")
        lines.append(f"{'':13}(in full: {place})")
    return lines


def _error_of(path: str) -> str:
    try:
        return error_line(Path(path).read_text(errors="replace")) or "no error message"
    except OSError:
        return "its error file cannot be read"
