"""What an experiment's folder has about a search as a whole: searcher, scheduler, metric, versions."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from horovod_tune.analysis.experiment_metadata import METADATA_PREFIX, METADATA_SUFFIX
from horovod_tune.analysis.reader.folders import Entry, Folder
from horovod_tune.analysis.reader.metadata import Metadata, run_metadata, searcher_metadata
from horovod_tune.analysis.reader.plain_values import read_json
from horovod_tune.analysis.reader.records import Problem, TrialRecord
from horovod_tune.analysis.reader.runs import Run

_SEARCHER = "searcher-state-*"
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

    def metadata(self, written: dict[str, Any], problems: list[Problem]) -> Metadata:
        """Return what the driver wrote about this run, and what `BayesOptSearch` saved."""
        known = run_metadata(written)
        names = {entry.name for entry in self.listed if not entry.odd_name}
        ours = [name for name in fnmatch.filter(names, _SEARCHER) if self._is_of_this_run(name)]
        for name in sorted(ours, reverse=True)[:1]:
            try:
                data = self._read(name) or b""
                if data[:1] != b"\x80":  # a pickle of one of Tune's own searchers, which is not opened
                    known.add(searcher_metadata(data))
            except (ValueError, OSError) as error:
                problems.append(Problem(name, f"not readable ({error})"))
        return known

    def _read(self, name: str) -> bytes | None:
        data = self.folder.read(name, _LARGEST)
        return data or (self.staged.read(name, _LARGEST) if self.staged is not None else None)

    def _is_of_this_run(self, name: str) -> bool:
        """Return True if a searcher's state has the stamp of one of this run's drivers."""
        if len(self.runs) < 2 or self.chosen is None:
            return True
        return any(stamp in name for stamp in self.chosen.stamps)

    def written(self, trials: Iterable[TrialRecord], problems: list[Problem]) -> dict[str, Any]:
        """Return what the driver wrote when this run started."""
        ours = {trial.trial_id for trial in trials}
        found: dict[str, float] = {}
        for entry in self.listed:
            if not (entry.name.startswith(METADATA_PREFIX) and entry.name.endswith(METADATA_SUFFIX)):
                continue
            if entry.name.removeprefix(METADATA_PREFIX).removesuffix(METADATA_SUFFIX) in ours:
                found[entry.name] = max(entry.modified or 0.0, found.get(entry.name, 0.0))
        for name in sorted(found, key=lambda name: -found[name]):
            try:
                written, _ = read_json(self._read(name) or b"")
                if isinstance(written, dict):
                    return written
                problems.append(Problem(name, "is not a JSON object"))
            except (ValueError, OSError) as error:
                problems.append(Problem(name, f"not readable ({error})"))
        return {}
