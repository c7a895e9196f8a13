"""What an experiment's folder says of a search as a whole: searcher, scheduler, metric, versions."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from horovod_tune.analysis.reader.folders import Entry, Folder
from horovod_tune.analysis.reader.plain_values import read_json
from horovod_tune.analysis.reader.records import Problem, TrialRecord
from horovod_tune.analysis.reader.runs import Run
from horovod_tune.analysis.reader.tune_pickles import TunerFacts, searcher_facts, tuner_facts
from horovod_tune.experiment_facts import FACTS_PREFIX, FACTS_SUFFIX

_SEARCHERS = ("basic-variant-state-*", "search_gen_state-*", "searcher-state-*")
_TUNER = "tuner.pkl"
_LARGEST = 64 * 2**20


@dataclass(frozen=True)
class RunFiles:
    """The files of the `chosen` one of an experiment's `runs`; `staged` is its driver's own copy."""

    folder: Folder
    staged: Folder | None
    entries: Sequence[Entry]
    runs: Sequence[Run]
    chosen: Run | None

    @property
    def listed(self) -> list[Entry]:
        return [*self.entries, *(self.staged.entries() if self.staged is not None else ())]

    def tuner_facts(self, runner_metric: str | None, problems: list[Problem]) -> TunerFacts:
        """What `tuner.pkl` and the searcher's state say of this run."""
        facts, searchers = TunerFacts(), TunerFacts()
        names = {entry.name for entry in self.listed if not entry.odd_name}
        for pattern in _SEARCHERS:
            ours = [name for name in fnmatch.filter(names, pattern) if self._is_of_this_run(name)]
            for name in sorted(ours, reverse=True)[:1]:
                self._add(name, searchers, searcher_facts, problems)
        facts.num_samples = searchers.num_samples  # it has counted the grid's points too, tuner.pkl has not
        if _TUNER in names and self._tuner_is_of_this_run():
            tuner = TunerFacts()
            self._add(_TUNER, tuner, tuner_facts, problems)
            # Tuner.fit hands its metric on: with another one, tuner.pkl is of another search.
            if runner_metric is None or tuner.metric in (runner_metric, None):
                facts.add(tuner)
        facts.add(searchers)
        return facts

    def _add(
        self, name: str, facts: TunerFacts, read: Callable[[bytes], TunerFacts], problems: list[Problem]
    ) -> None:
        try:
            facts.add(read(self._read(name) or b""))
        except (ValueError, OSError) as error:
            problems.append(Problem(name, f"not readable ({error})"))

    def _read(self, name: str) -> bytes | None:
        data = self.folder.read(name, _LARGEST)
        return data or (self.staged.read(name, _LARGEST) if self.staged is not None else None)

    def _is_of_this_run(self, name: str) -> bool:
        """Whether a searcher's state has the stamp of one of this run's drivers."""
        if len(self.runs) < 2 or self.chosen is None:
            return True
        return any(stamp in name for stamp in self.chosen.stamps)

    def _tuner_is_of_this_run(self) -> bool:
        """A Tuner writes tuner.pkl when it is made: after the run before has ended, before its own ends."""
        if len(self.runs) < 2 or self.chosen is None:
            return True
        written = next((e.modified for e in self.entries if e.name == _TUNER), None)
        if written is None:
            return self.chosen is self.runs[-1]
        index = self.runs.index(self.chosen)
        before = self.runs[index - 1].last_write if index else None
        after = self.chosen.last_write if index + 1 < len(self.runs) else None
        return (before is None or before < written) and (after is None or written <= after)

    def written_facts(self, trials: Iterable[TrialRecord], problems: list[Problem]) -> dict[str, Any]:
        """What our callback has left of this run: metric and mode, versions, the cluster."""
        ours = {trial.trial_id for trial in trials}
        found: dict[str, float] = {}
        for entry in self.listed:
            if not (entry.name.startswith(FACTS_PREFIX) and entry.name.endswith(FACTS_SUFFIX)):
                continue
            if entry.name.removeprefix(FACTS_PREFIX).removesuffix(FACTS_SUFFIX) in ours:
                found[entry.name] = max(entry.modified or 0.0, found.get(entry.name, 0.0))
        for name in sorted(found, key=lambda name: -found[name]):
            try:
                facts, _ = read_json(self._read(name) or b"")
                if isinstance(facts, dict):
                    return facts
                problems.append(Problem(name, "holds no facts"))
            except (ValueError, OSError) as error:
                problems.append(Problem(name, f"not readable ({error})"))
        return {}
