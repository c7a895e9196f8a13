"""Reads what a search wrote about itself in JSON: our metadata file, and the state of `BayesOptSearch`.

Both are validated and become fields of `ExperimentRecord`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from horovod_tune.analysis.experiment_metadata import METADATA_PREFIX, METADATA_SUFFIX
from horovod_tune.analysis.reader.folders import Entry, Folder
from horovod_tune.analysis.reader.plain_values import mapping, number_or_none, read_json, text_or_none
from horovod_tune.analysis.reader.records import Domain, Problem
from horovod_tune.analysis.scoring import parse_limit


def metadata_of(
    folder: Folder,
    entries: Iterable[Entry],
    stamps: Collection[str],
    trial_ids: Collection[str],
    problems: list[Problem],
) -> dict[str, Any]:
    """Return what the driver of these trials wrote, completed by what `BayesOptSearch` saved.

    `entries` are the folder's and those of its staged copy. Only a state of `BayesOptSearch` with one of
    `stamps` in its name is read, because the folder may have several searches.
    """

    def read(names: Iterable[str], parse: Callable[[bytes], dict[str, Any]]) -> list[dict[str, Any]]:
        found = []
        for name in names:
            try:  # the end of a search is recorded only in the storage
                found.append(parse(replace(folder, staged=None).read(name) or folder.read(name) or b""))
            except (ValueError, OSError) as error:
                problems.append(Problem(name, f"not readable ({error})"))
        return found

    newest_first = sorted(entries, key=lambda entry: -(entry.modified or 0.0))
    names = dict.fromkeys(entry.name for entry in newest_first if not entry.odd_name)
    ours = {f"{METADATA_PREFIX}{trial_id}{METADATA_SUFFIX}" for trial_id in trial_ids}
    drivers = read((name for name in names if name in ours), run_metadata)
    # A copy's files have other times.
    written = [number_or_none(each["metadata"].get("written")) or 0.0 for each in drivers]
    known = drivers[written.index(max(written))] if drivers else {}
    states = [name for name in names if name.startswith("searcher-state-") and any(s in name for s in stamps)]
    (searcher,) = read(sorted(states, reverse=True)[:1], searcher_metadata) or [{}]
    return searcher | {name: value for name, value in known.items() if value}


def run_metadata(data: bytes) -> dict[str, Any]:
    """Return what the driver wrote when the search started (`horovod_tune_run-*.json`)."""
    written, _ = read_json(data)
    if not isinstance(written, dict):
        raise ValueError("not a JSON object")
    samples, resources = written.get("num_samples"), written.get("resources")
    texts = {name: text_or_none(written.get(name)) for name in ("metric", "mode", "searcher", "scheduler")}
    return texts | {
        "metadata": written,
        "num_samples": samples if isinstance(samples, int) and 0 < samples < 2**31 else None,
        "time_budget_s": number_or_none(written.get("time_budget_s")),
        "domains": {name: _domain(mapping(one)) for name, one in mapping(written.get("space")).items()},
        "constants": mapping(written.get("constants")),
        "resources": tuple(map(_amounts, resources)) if isinstance(resources, list) else (),
    }


def _domain(written: dict[str, Any]) -> Domain:
    kind, text = text_or_none(written.get("kind")), text_or_none(written.get("text"))
    return Domain(kind or "other", text or "", log=written.get("log") is True)


def _amounts(bundle: Any) -> dict[str, float]:
    numbers = {name[:300]: number_or_none(amount) for name, amount in mapping(bundle).items()}
    return {name: amount for name, amount in numbers.items() if amount is not None}


def searcher_metadata(data: bytes) -> dict[str, Any]:
    """Return what `BayesOptSearch` saved: metric, mode, limits and front.

    Empty for the pickle of one of Tune's own searchers, which is not read. Raises `ValueError` if invalid.
    """
    if data[:1] == b"\x80":
        return {}
    state = mapping(read_json(data)[0])
    try:
        limits = tuple(parse_limit(str(text)) for text in state.get("limits") or ())
    except (TypeError, ValueError) as error:
        raise ValueError(f"its limits: {error}") from error
    return {
        "metric": text_or_none(state.get("metric")),
        "mode": text_or_none(state.get("mode")),
        "searcher": text_or_none(str(state.get("format", "")).rsplit(".", 1)[-1]) or None,
        "limits": limits,
        "front": _front(state.get("metric"), state.get("mode")),
    }


def _front(metrics: Any, modes: Any) -> Mapping[str, str]:
    """Return the mode of each metric of a search with several metrics; empty for any other."""
    if not (isinstance(metrics, list) and isinstance(modes, list) and len(metrics) == len(modes)):
        return {}
    if not all(isinstance(name, str) for name in metrics) or set(map(str, modes)) - {"min", "max"}:
        return {}
    return dict(zip(metrics, modes, strict=True))
