"""What a search wrote about itself: the driver with `experiment_metadata`, and `BayesOptSearch` its state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

from horovod_tune.analysis.reader.folders import Folder
from horovod_tune.analysis.reader.plain_values import mapping, number_or_none, read_object, text_or_none
from horovod_tune.analysis.reader.records import Domain, Problem
from horovod_tune.experiment_metadata import file_name
from horovod_tune.scoring import parse_limit


def metadata_of(
    folder: Folder,
    names: Iterable[str],
    stamps: Collection[str],
    trial_ids: Collection[str],
    problems: list[Problem],
) -> dict[str, Any]:
    """Return the metadata of the search of these trials, as fields of `ExperimentRecord`.

    `names` are those of the folder's entries. Only a state of `BayesOptSearch` with one of `stamps` in its
    name is read, because the folder may have several searches.
    """

    def read(name: str, parse: Callable[[bytes], dict[str, Any]]) -> dict[str, Any]:
        try:  # the end of a search is recorded only in the storage
            return parse(replace(folder, staged=None).read(name) or folder.read(name) or b"")
        except (TypeError, ValueError, OSError) as error:
            problems.append(Problem(name, str(error)))
            return {}

    ours = set(map(file_name, trial_ids))
    drivers = [driver for name in sorted(ours & set(names)) if (driver := read(name, run_metadata))]
    last = max(drivers, key=lambda each: number_or_none(each["metadata"].get("written")) or 0.0, default={})
    states = [name for name in names if name.startswith("searcher-state-") and any(s in name for s in stamps)]
    searcher = read(max(states), searcher_metadata) if states else {}
    return searcher | {name: value for name, value in last.items() if value}


def run_metadata(data: bytes) -> dict[str, Any]:
    """Return what the driver wrote when the search started (`horovod_tune_run-*.json`)."""
    written = read_object(data)
    samples, resources = written.get("num_samples"), written.get("resources")
    texts = {name: text_or_none(written.get(name)) for name in ("metric", "mode", "searcher", "scheduler")}
    return texts | {
        "metadata": written,
        "num_samples": samples if isinstance(samples, int) and 0 < samples < 2**31 else None,
        "time_budget_s": number_or_none(written.get("time_budget_s")),
        "domains": {name: _domain(mapping(one)) for name, one in mapping(written.get("space")).items()},
        "constants": mapping(written.get("constants")),
        "ends": mapping(written.get("ends")),
        "resources": tuple(map(_amounts, resources)) if isinstance(resources, list) else (),
    }


def _domain(written: dict[str, Any]) -> Domain:
    kind, text = text_or_none(written.get("kind")), text_or_none(written.get("text"))
    return Domain(kind or "other", text or "", log=written.get("log") is True)


def _amounts(bundle: Any) -> dict[str, float]:
    numbers = {name[:300]: number_or_none(amount) for name, amount in mapping(bundle).items()}
    return {name: amount for name, amount in numbers.items() if amount is not None}


def searcher_metadata(data: bytes) -> dict[str, Any]:
    """Return what `BayesOptSearch` saved: metric, mode, limits, and `front`, the modes of several metrics.

    Empty for the state of another searcher, which may have any format. Raises `TypeError` or `ValueError` if
    invalid.
    """
    if not data.startswith(b'{"format": "horovod_tune.'):
        return {}
    state = read_object(data)
    metric, mode = state.get("metric"), state.get("mode")
    pairs = zip(metric, mode, strict=False) if isinstance(metric, list) and isinstance(mode, list) else ()
    front = {name: one for name, one in pairs if isinstance(name, str) and one in ("min", "max")}
    return {
        "metric": text_or_none(metric),
        "mode": text_or_none(mode),
        "searcher": text_or_none(str(state.get("format")).rsplit(".", 1)[-1]),
        "limits": tuple(map(parse_limit, state.get("limits") or ())),
        "front": front if len(front) > 1 else {},
    }
