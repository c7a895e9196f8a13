"""What was read from an experiment's files, before anything is computed: plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from horovod_tune.scoring import Limit, value_of


@dataclass(frozen=True)
class Problem:
    """A part that could not be read completely, or at all; `where` names the trial or the file."""

    where: str
    what: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


@dataclass(frozen=True)
class Domain:
    """One hyperparameter's range: `kind` is "float", "integer", "categorical" or "other" (a function).

    `text` is the domain as Tune's functions write it, for example `loguniform(0.0001, 0.1)`.
    """

    kind: str
    text: str
    log: bool = False


@dataclass(frozen=True, repr=False)
class TrialRecord:
    """One trial as in Tune's files. Times are Unix times in seconds, None if they are not recorded.

    `rows` are the reports in result.json, in its order. `directory` is the path or URI of the trial's folder
    in the experiment's storage. `resources` are the bundles of its placement group, in Ray's units. `stop`
    has the values at which a whole training ends, by metric.
    """

    trial_id: str
    number: int
    name: str
    config: dict[str, Any]
    status: str
    directory: str
    start_time: float | None = None
    end_time: float | None = None
    last_result: dict[str, Any] | None = None
    rows: tuple[dict[str, Any], ...] = ()
    num_failures: int = 0
    error: str | None = None
    resources: tuple[dict[str, float], ...] = ()
    stop: dict[str, Any] | None = None

    def __repr__(self) -> str:
        return f"<trial {self.trial_id}: {self.shown_status}, {len(self.reports)} reports, {self.config}>"

    @property
    def shown_status(self) -> str:
        """The status in lower case; "stopped" if a scheduler, a stopper or the search's time ended the trial.

        Known only of distributed trials. One that reached its stop criterion is "terminated".
        """
        last = self.rows[-1] if self.rows else {}
        if self.status != "TERMINATED" or self.stop is None or "world_size" not in last:
            return self.status.lower()
        # Tune marks the last report of a trial that it ends, and afterwards the result of one that returned.
        ends = [(value_of(last, name), value_of(self.stop, name)) for name in self.stop]
        reached = any(value >= end for value, end in ends if value is not None and end is not None)
        has_returned = last.get("done") is not True and (self.last_result or {}).get("done") is True
        return "terminated" if reached or has_returned else "stopped"

    @property
    def reports(self) -> tuple[dict[str, Any], ...]:
        """The rows; if result.json is lost, the last report in Tune's state file."""
        return self.rows or ((self.last_result,) if self.last_result else ())

    @property
    def folder_name(self) -> str:
        """The name of the trial's folder; empty if it has none."""
        place = self.directory.partition("?")[0] if "://" in self.directory else self.directory
        return place.rsplit("/", 1)[-1]


@dataclass(frozen=True, kw_only=True, repr=False)
class ExperimentRecord:
    """One search as in Tune's files; what is not recorded is None or empty.

    `run` names it (None if its state file is lost), `runs` all searches of the same folder, oldest first.
    `sessions` are the Unix times at which its drivers started: a resumed search has several. `limits`, and
    the metrics with their modes in `front`, are those that `BayesOptSearch` was given. `metadata` is
    everything in the driver's metadata file.
    """

    name: str
    path: str
    trials: tuple[TrialRecord, ...]
    run: str | None = None
    runs: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    start_time: float | None = None
    last_write: float | None = None
    sessions: tuple[float, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    metric: str | None = None
    mode: str | None = None
    num_samples: int | None = None
    time_budget_s: float | None = None
    searcher: str | None = None
    scheduler: str | None = None
    domains: dict[str, Domain] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    limits: tuple[Limit, ...] = ()
    front: dict[str, str] = field(default_factory=dict)

    @property
    def runs_note(self) -> str:
        """Which of a folder's searches this is, and how to choose another; empty if there is only one."""
        if len(self.runs) < 2:
            return ""
        others = ", ".join(name for name in self.runs if name != self.run)
        which = "the newest" if self.run == self.runs[-1] else "one"
        return (
            f"{len(self.runs)} searches wrote into this folder; this is {which} of them, {self.run}. "
            f'Choose another with analyze(…, run="…") or --run: {others}'
        )

    def __repr__(self) -> str:
        return f"<record of {self.name!r}: {len(self.trials)} trials, {len(self.problems)} problems>"
