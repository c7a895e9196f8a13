"""What a search writes about itself in JSON: the driver writes it, `analyze` reads it.

Our file has the metric, mode, space, searcher, scheduler, resources, package versions and the size of the
cluster, which Tune writes only in pickles, or not at all. `BayesOptSearch` saves its metrics and limits.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from horovod_tune.analysis.reader.folders import Folder
from horovod_tune.analysis.reader.plain_values import mapping, number_or_none, read_object, text_or_none
from horovod_tune.analysis.reader.records import Domain, Problem
from horovod_tune.analysis.scoring import parse_limit

# In a file's name, the id of the driver's first trial is between the two: a folder may hold several searches.
_PREFIX, _SUFFIX = "horovod_tune_run-", ".json"
_PACKAGES = ("horovod_tune", "ray", "torch", "horovod", "torch_xla", "bayesian-optimization")
_MOST_CONSTANTS, _LONGEST_TEXT = 5_000, 300


def write_metadata(trial: Any, facts: Mapping[str, Any]) -> None:
    """Write metadata of the search that starts `trial`; Tune copies the driver's folder to the storage.

    What another callback wrote for the same search is kept unless `known` overrides it. Raises `OSError`.
    """
    folder = Path(trial.storage.experiment_driver_staging_path)
    place = folder / f"{_PREFIX}{trial.trial_id}{_SUFFIX}"
    folder.mkdir(parents=True, exist_ok=True)
    before = json.loads(place.read_text()) if place.exists() else {}
    versions = {"Python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    bundles = getattr(trial.placement_group_factory, "bundles", [])
    written = before | {"versions": versions, "cluster": _cluster(), "resources": bundles}
    written |= {"written": time.time()} | {name: value for name, value in facts.items() if value is not None}
    partial = folder / f".{place.name}.{os.getpid()}"
    partial.write_text(json.dumps(written))
    partial.replace(place)


def write_end(trial: Any) -> None:
    """Record in a search's metadata that it has ended; `trial` is its driver's first. Raises `OSError`.

    This is written to the storage itself: Tune has already copied the driver's folder for the last time.
    """
    name = f"{_PREFIX}{trial.trial_id}{_SUFFIX}"
    written = json.loads((Path(trial.storage.experiment_driver_staging_path) / name).read_text())
    place = f"{trial.storage.experiment_fs_path}/{name}"
    with trial.storage.storage_filesystem.open_output_stream(place) as file:
        file.write(json.dumps(written | {"ended": True}).encode())


def _cluster() -> dict[str, Any]:
    import ray

    resources = ray.cluster_resources()
    shown = {name: resources[name] for name in ("CPU", "GPU", "TPU") if name in resources}
    nodes = sum(1 for node in ray.nodes() if node.get("Alive"))
    memory = {"GB of memory": round(resources["memory"] / 1e9, 1)} if "memory" in resources else {}
    return {"nodes": nodes, **shown, **memory, "system": f"{platform.system()} {platform.machine()}"}


def space_metadata(config: dict[str, Any]) -> dict[str, Any]:
    """Return the domains of a search space by flat name (`net/width`), and its constants.

    >>> space_metadata({"net": {"layers": {"grid_search": [1, 2]}, "act": "relu"}})["constants"]
    {'net/act': 'relu'}
    """
    from ray.tune.search.variant_generator import parse_spec_vars

    constants, domains, grids = parse_spec_vars(config)
    return {
        "space": {_name(path): _domain_metadata(domain) for path, domain in (*domains, *grids)},
        "constants": {_name(path): _plain(value) for path, value in constants[:_MOST_CONSTANTS]},
    }


def _name(path: tuple[Any, ...]) -> str:
    return "/".join(map(str, path))


def _plain(value: Any) -> Any:
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return value if is_plain else str(value)[:_LONGEST_TEXT]


def _domain_metadata(domain: Any) -> dict[str, Any]:
    kind, sampler, step = type(domain).__name__, domain.sampler, None
    if type(sampler).__name__ == "Quantized":
        sampler, step = sampler.sampler, sampler.q
    if kind == "Categorical":
        values = [_plain(value) for value in domain.categories]
        function = "grid_search" if type(sampler).__name__ == "Grid" else "choice"
        return {"kind": "categorical", "text": f"{function}({values!r})"}
    if kind not in ("Float", "Integer"):
        return {"kind": "other", "text": "sample_from(…)"}
    name = type(sampler).__name__
    if "Normal" in name:
        return {"kind": "float", "text": f"randn({sampler.mean}, {sampler.sd})"}
    log = "LogUniform" in name
    function = f"{'q' if step else ''}{'log' if log else ''}{'randint' if kind == 'Integer' else 'uniform'}"
    ends = [str(end).removesuffix(".0") for end in (domain.lower, domain.upper, step) if end is not None]
    return {"kind": kind.lower(), "text": f"{function}({', '.join(ends)})", "log": log}


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

    ours = {f"{_PREFIX}{trial_id}{_SUFFIX}" for trial_id in trial_ids}
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
