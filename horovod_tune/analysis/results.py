"""The results of a search as data: its trials' values, which of them is best, and what tells them apart."""

from __future__ import annotations

import itertools
import math
import re
import time
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from horovod_tune.analysis import frames
from horovod_tune.analysis.printable import digits_for, one_line
from horovod_tune.analysis.reader.folders import Folder
from horovod_tune.analysis.reader.plain_values import TUNES_OWN, iteration_of
from horovod_tune.analysis.reader.records import ExperimentRecord, TrialRecord
from horovod_tune.analysis.reader.tune_files import read_experiment
from horovod_tune.analysis.trial_details import (
    attempts,
    config_at,
    plain_text,
    rank_changes,
    report_times,
    spans,
)
from horovod_tune.analysis.varying_parameters import Parameter, find_varying
from horovod_tune.errors import HorovodTuneError
from horovod_tune.scoring import Limit, as_number, kept, known_values, value_of

if TYPE_CHECKING:
    from typing_extensions import Self

# Does not match checkpoint_000001.part, an incomplete copy.
_CHECKPOINT = re.compile(r"checkpoint_[A-Za-z0-9_-]+")
_UNRANKED = 8  # at most this many metrics are shown if none is known to compare trials by
_QUIET_S = 660.0  # Tune copies to its storage every 300 s: if two copies are missing, the search has ended


class MetricUnknown(HorovodTuneError, ValueError):
    """Raised if metric or mode is not known, or no trial reported the metric (or that of a limit)."""


class Results:
    """The data of an `Analysis`, without what shows it."""

    def __init__(
        self,
        record: ExperimentRecord,
        folder: Folder,
        *,
        metric: str | None,
        mode: str | None,
        scope: str = "last",
        limits: Sequence[Limit] = (),
        trial_ids: frozenset[str] | None = None,
    ):
        self.record, self.folder, self._trial_ids = record, folder, trial_ids
        self.name, self.path, self.run, self.runs = record.name, record.path, record.run, record.runs
        self.trials, self.problems = record.trials, record.problems
        self.limits = tuple(limits)
        self.metric = metric or record.metric
        self.mode = mode or (record.mode if self.metric == record.metric else None)
        self.scope = scope

    @property
    def state(self) -> str:
        """ "finished", "running", "interrupted", or "unknown" (it does not run, and the state file is lost).

        If more reports may come, it counts as running until nothing has been written for 11 minutes.
        """
        over = self.record.metadata.get("ended") is not False  # the key is missing if no trial is distributed
        over &= bool(self.trials) and all(t.status in ("TERMINATED", "ERROR") for t in self.trials)
        if not over and time.time() - (self.record.last_write or 0.0) < _QUIET_S:
            return "running"
        if self.run is None:
            return "unknown"
        return "finished" if over else "interrupted"

    def reload(self) -> Self:
        """Return the experiment as it is now."""
        ids = self._trial_ids
        again = read_experiment(self.folder, run=self.record.run if ids is None else None, trial_ids=ids)
        same = {"metric": self.metric, "mode": self.mode, "scope": self.scope, "limits": self.limits}
        return type(self)(again, self.folder, trial_ids=ids, **same)  # type: ignore[arg-type]

    def require_metric(self, *, with_limits: bool = True) -> tuple[str, str]:
        """Return metric and mode. Raises `MetricUnknown` if one, or a limit's metric, is not known."""
        if self.metric is None or self.mode is None:
            chosen = {"metric": self.metric, "mode": self.mode}
            missing = " and ".join(name for name, value in chosen.items() if not value)
            only = self.reported_numbers[0] if len(self.reported_numbers) == 1 else "NAME"
            name = one_line(self.metric or only)
            front = " and ".join(map(one_line, self.record.front))
            why = f"does not record its {missing}"
            if self.metric and self.record.metric and self.metric != self.record.metric:
                why = f"records metric {self.record.metric!r}, but not the mode of {self.metric!r}"
            if front:
                why = f"optimised several metrics ({front}; see pareto_front()), not a single one"
            raise MetricUnknown(
                f"the experiment {self.name!r} {why}: "
                f'pass analyze(…, metric="{name}", mode="min" or "max"), '
                f"or --metric {name} and --mode min or max to horovod-tune. "
                f"Numbers that its trials reported: {self._reported_text}"
            )
        for name in (self.metric, *(limit.metric for limit in self.limits if with_limits)):
            self.require_reported(name)
        return self.metric, self.mode

    def require_reported(self, metric: str) -> None:
        """Raise `MetricUnknown` if trials have reported numbers, but none of this name."""
        if self.reported_numbers and not self.is_known(metric):
            what = f"no trial reported a number named {metric!r}"
            raise MetricUnknown(f"{what}; reported: {self._reported_text}")

    def is_known(self, metric: str) -> bool:
        """Return True if trials reported numbers of this name, or Tune adds them."""
        return metric in TUNES_OWN or metric in self.reported_numbers

    @cached_property
    def reported_numbers(self) -> tuple[str, ...]:
        """The names under which trials reported numbers, without those that Tune adds."""
        names: dict[str, None] = {}
        rows = chain.from_iterable((*trial.rows, trial.last_result or {}) for trial in self.trials)
        for key, value in chain.from_iterable(row.items() for row in rows):
            if key in names or key == "config" or isinstance(value, str):
                continue
            flat = frames.flatten({key: value})
            names |= {name: None for name, number in flat.items() if as_number(number) is not None}
        return tuple(name for name in names if name not in TUNES_OWN)

    def unranked(self) -> dict[str, list[float | None]]:
        """Return each trial's last numbers by name, to show them if no metric is known; {} if one is."""
        if self.metric is not None:
            return {}
        return {
            name: [
                next((v for row in reversed(trial.reports) if (v := value_of(row, name)) is not None), None)
                for trial in self.trials
            ]
            for name in self.reported_numbers[:_UNRANKED]
        }

    @property
    def _reported_text(self) -> str:
        return ", ".join(map(one_line, self.reported_numbers[:30])) or "none"

    @cached_property
    def reports(self) -> pd.DataFrame:
        """One row per report, by trial and then in the order of reporting.

        Columns: trial (its index in `trials`), row (the report's index in the trial), iteration and time
        (Unix time in seconds; NaN if unknown), attempt, session (how many drivers of the search had started),
        value (the metric's newest value up to this report), has_value (True if this report has the
        metric), allowed (True if it meets the limits).
        """
        metric, _ = self.require_metric(with_limits=False)  # a metric that is not known violates its limit
        rows = []
        for number, trial in enumerate(self.trials):
            reports = trial.reports
            values, allowed = known_values(reports, [metric]), kept(reports, self.limits)
            told = zip(reports, report_times(trial), attempts(reports), values, allowed, strict=True)
            for row, (report, time_s, attempt, (value,), good) in enumerate(told):
                has_value = value_of(report, metric) is not None
                rows.append((number, row, iteration_of(report), time_s, attempt, value, has_value, good))
        types = {"trial": int, "row": int, "iteration": float, "time": float, "attempt": int}
        types |= {"value": float, "has_value": bool, "allowed": bool}
        made = pd.DataFrame(rows, columns=list(types)).astype(types)
        return made.assign(session=np.searchsorted(self.record.sessions, made["time"]))

    @cached_property
    def scores(self) -> pd.DataFrame:
        """One row per trial: the metric's last and best value, best_iteration, best_row, and allowed.

        Only finite values of reports that meet the limits can be best; of equal values, the earliest is.
        Missing values are NaN or NA. `allowed` is True if the last report meets the limits.
        """
        reports, number = self.reports, pd.RangeIndex(len(self.trials))
        finite = reports[np.isfinite(reports["value"]) & reports["allowed"]]
        ranked = finite.sort_values("value", ascending=self.mode == "min", kind="stable")
        best = ranked.drop_duplicates("trial").set_index("trial").reindex(number)
        ends = reports.drop_duplicates("trial", keep="last").set_index("trial")
        return pd.DataFrame(
            {
                "last": ends["value"].reindex(number),
                "best": best["value"],
                "best_iteration": best["iteration"].astype("Int64"),
                "best_row": best["row"].astype("Int64"),
                "allowed": ends["allowed"].reindex(number, fill_value=True),
            }
        )

    @cached_property
    def spans(self) -> pd.DataFrame:
        """One row per period in which a driver ran a trial, by trial; times are Unix times in seconds.

        Columns: trial (its index in `trials`), begin (of its start-up), trained (when training began), end.
        """
        sessions = self.record.sessions
        periods = [(n, *span) for n, trial in enumerate(self.trials) for span in spans(trial, sessions)]
        return pd.DataFrame(periods, columns=["trial", "begin", "trained", "end"])

    @cached_property
    def session_gaps(self) -> list[tuple[float, float]]:
        """The gaps between drivers, in Unix time: from the last report before a start to that start."""
        gaps = []
        for before, session in itertools.pairwise(self.record.sessions):
            ends = self.spans.loc[self.spans["begin"] < session, "end"].clip(upper=session)
            # A driver that was killed before a report leaves nothing but its start.
            gaps.append((max(before, float(ends.max())) if len(ends) else session, session))
        return gaps

    @property
    def _best(self) -> int:
        self.require_metric()
        if self.best_number is None:
            raise ValueError(self.no_best_reason)
        return self.best_number

    @property
    def is_scored(self) -> bool:
        """Return True if any trial's last value of the metric is finite, within the limits or not."""
        return self.is_known_metric and bool(np.isfinite(self.scores["last"]).any())

    @cached_property
    def values(self) -> np.ndarray:
        """The values by which trials are compared, shape (trials,): the last; with scope "all", the best."""
        values = self.scores["last" if self.scope == "last" else "best"].to_numpy()
        return np.where(np.isfinite(values), values, math.nan)

    @cached_property
    def _costs(self) -> np.ndarray:
        """`values`, negated if higher is better; NaN if a trial does not meet the limits."""
        if not self.is_known_metric:
            return np.full(len(self.trials), math.nan)
        allowed = self.scores["allowed"] | (self.scope == "all")
        return np.where(allowed, self.values if self.mode == "min" else -self.values, math.nan)

    @property
    def best_number(self) -> int | None:
        """The best trial's index in `trials`; None if there is none."""
        return int(np.nanargmin(self._costs)) if np.isfinite(self._costs).any() else None

    @property
    def ranked(self) -> list[int]:
        """The trials' indices, best first; those without a value, or outside the limits, are last."""
        return np.argsort(self._costs, kind="stable").tolist()  # NaN is last

    @property
    def no_best_reason(self) -> str:
        """The reason why there is no best trial, if there is none."""
        try:
            self.require_metric()
        except ValueError as error:
            return str(error)
        within = f" within {' and '.join(map(str, self.limits))}" if self.limits else ""
        value = f"{'last ' if self.scope == 'last' else ''}value of {self.metric!r}{within}"
        return f"no trial of {self.name!r} has a finite {value}"

    @property
    def best_trial(self) -> TrialRecord:
        """The first trial that has the best finite value. Raises `ValueError` if there is none."""
        return self.trials[self._best]

    @property
    def best_value(self) -> float:
        """The value of the metric with which the best trial won."""
        return float(self.values[self._best])

    def value_text(self, value: float, digits: int = 6) -> str:
        """Return a value of the metric as text, with as many digits as tell the trials apart."""
        return f"{value:.{digits_for(self.values, digits)}g}"

    @property
    def best_result(self) -> dict[str, Any]:
        """The best trial's last report, or with scope "all" its best report."""
        return dict(self._compared[self._best])

    @property
    def best_config(self) -> dict[str, Any]:
        """The best trial's hyperparameters, as they were at `best_result`."""
        return dict(self.configs[self._best])

    @cached_property
    def _compared(self) -> list[dict[str, Any]]:
        """The report by which each trial is compared; empty if it has none."""
        best = self.scores["best_row"].fillna(-1) if self.scope == "all" and self.is_known_metric else None
        rows = [-1] * len(self.trials) if best is None else best.tolist()  # without a best one, the last
        return [t.reports[row] if t.reports else {} for t, row in zip(self.trials, rows, strict=True)]

    @cached_property
    def configs(self) -> list[dict[str, Any]]:
        """Each trial's hyperparameters, as they were at the report by which it is compared."""
        return [config_at(*each) for each in zip(self.trials, self._compared, strict=True)]

    @cached_property
    def varying_parameters(self) -> list[Parameter]:
        """The hyperparameters with at least two values among the trials, in the configuration's order."""
        return find_varying(self.configs, self.record.domains)

    @cached_property
    def rank_changes(self) -> list[tuple[str, str]]:
        """Where the ranks of an elastic trial changed, as text, and why."""
        changes = ((trial, *change) for trial in self.trials for change in rank_changes(trial))
        return [(f"{trial.trial_id}, at iteration {at}", why) for trial, at, why in changes]

    @property
    def best_logdir(self) -> str:
        """The best trial's folder: a path or a URI."""
        return self.best_trial.directory

    @property
    def best_checkpoint(self) -> Any:
        """The best trial's best Tune `Checkpoint` (by the metric, within the limits); None if it has none.

        If its reports name no checkpoints, as those of plain Tune classes, it is the newest one.
        """
        from ray.tune import Checkpoint

        folder = self._best_checkpoint_folder
        return None if folder is None else Checkpoint(folder.path, filesystem=folder.filesystem)

    @property
    def best_checkpoint_path(self) -> str | None:
        """The path or URI of the best checkpoint; None if there is none."""
        return None if self._best_checkpoint_folder is None else self._best_checkpoint_folder.shown

    @cached_property
    def _best_checkpoint_folder(self) -> Folder | None:
        _, mode = self.require_metric()
        if not self.best_trial.directory:
            return None
        home = self.folder.below(self.best_trial.folder_name)
        on_disk = {e.name for e in home.entries() if e.is_dir and _CHECKPOINT.fullmatch(e.name)}
        # Ray adds a checkpoint's name to the report that came with it.
        named = [str(report.get("checkpoint_dir_name", "")) for report in self.best_trial.reports]
        reports = self.reports[self.reports["trial"] == self._best].set_axis(named)
        values = reports["value"].where(reports["allowed"] & np.isfinite(reports["value"]))
        measured = values[~values.index.duplicated(keep="last")].sort_index().dropna()
        measured = measured[measured.index.isin(on_disk)]
        if len(measured):
            return home.below(str(measured.idxmin() if mode == "min" else measured.idxmax()))
        # Reports of class trainables name no checkpoint: take the newest, the closest to the last result.
        return home.below(max(on_disk)) if on_disk and not (self.limits and any(named)) else None

    @property
    def is_known_metric(self) -> bool:
        return self.metric is not None and self.mode is not None and self.is_known(self.metric)

    def errors(self) -> dict[str, str]:
        """Return each failed trial's error file as text, by trial_id; over 200 kB, the middle is left out."""
        # A trial that continued after a failure has such a file too.
        failed = [trial for trial in self.trials if trial.status in ("ERROR", "UNKNOWN")]
        return {trial.trial_id: plain_text(trial.error) for trial in failed if trial.error is not None}
