"""What a search has written about itself in JSON: our metadata file, and the state of `BayesOptSearch`."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horovod_tune.analysis.experiment_metadata import METADATA_PREFIX, METADATA_SUFFIX
from horovod_tune.analysis.reader.folders import Entry, Folder
from horovod_tune.analysis.reader.plain_values import mapping, number_or_none, read_json, text_or_none
from horovod_tune.analysis.reader.records import (
    Domain,
    Metadata,
    Problem,
    TrialRecord,
)
from horovod_tune.analysis.reader.runs import Run
from horovod_tune.analysis.scoring import parse_limit


def run_metadata(written: Mapping[str, Any]) -> Metadata:
    """Return what the driver wrote when the search started (`horovod_tune_run-*.json`)."""
    samples = written.get("num_samples")
    domains = {str(name): _domain(mapping(one)) for name, one in mapping(written.get("space")).items()}
    return Metadata(
        metric=text_or_none(written.get("metric")),
        mode=text_or_none(written.get("mode")),
        num_samples=samples if isinstance(samples, int) and 0 < samples < 2**31 else None,
        time_budget_s=number_or_none(written.get("time_budget_s")),
        searcher=text_or_none(written.get("searcher")),
        scheduler=text_or_none(written.get("scheduler")),
        domains=domains or None,
        constants=mapping(written.get("constants")),
        resources=tuple(map(_amounts, _list(written.get("resources")))),
    )


def searcher_metadata(data: bytes) -> Metadata:
    """Return what `BayesOptSearch` saved: metric, limits and front.

    Raises `ValueError` for anything else; the states of Tune's own searchers are pickles, which are not read.
    """
    state = mapping(read_json(data)[0])
    metric, mode = text_or_none(state.get("metric")), text_or_none(state.get("mode"))
    try:
        limits = tuple(parse_limit(str(text)) for text in state.get("limits") or ())
    except (TypeError, ValueError) as error:
        raise ValueError(f"its limits: {error}") from error
    return Metadata(
        metric=metric,
        mode=mode,
        searcher=text_or_none(str(state.get("format", "")).rsplit(".", 1)[-1]) or None,
        limits=limits,
        front=_front(state.get("metric"), state.get("mode")),
    )


def _domain(written: dict[str, Any]) -> Domain:
    kind, text = text_or_none(written.get("kind")), text_or_none(written.get("text"))
    return Domain(kind or "other", text or "", log=written.get("log") is True)


def _amounts(bundle: Any) -> dict[str, float]:
    numbers = {str(name)[:300]: number_or_none(amount) for name, amount in mapping(bundle).items()}
    return {name: amount for name, amount in numbers.items() if amount is not None}


def _front(metrics: Any, modes: Any) -> dict[str, str]:
    """Return the modes of the metrics of a search for several of them; empty for any other."""
    if not (isinstance(metrics, list) and isinstance(modes, list) and len(metrics) == len(modes)):
        return {}
    if not all(isinstance(name, str) for name in metrics) or set(map(str, modes)) - {"min", "max"}:
        return {}
    return dict(zip(metrics, modes, strict=True))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


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
        # If there are several runs, its name has the stamp of one of this run's drivers.
        stamps = self.chosen.stamps if self.chosen is not None and len(self.runs) > 1 else {""}
        ours = [name for name in fnmatch.filter(names, _SEARCHER) if any(stamp in name for stamp in stamps)]
        for name in sorted(ours, reverse=True)[:1]:
            try:
                data = self._read(name) or b""
                if data[:1] != b"\x80":  # a pickle of one of Tune's own searchers, which is not opened
                    known = known.filled_in(searcher_metadata(data))
            except (ValueError, OSError) as error:
                problems.append(Problem(name, f"not readable ({error})"))
        return known

    def _read(self, name: str) -> bytes | None:
        data = self.folder.read(name, _LARGEST)
        return data or (self.staged.read(name, _LARGEST) if self.staged is not None else None)

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
