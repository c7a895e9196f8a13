"""Runs in the driver: writes metadata for `analyze` that Tune writes only in pickles, or not at all.

One JSON file next to Tune's own has the metric, mode, space, searcher, scheduler, resources, package versions
and the size of the cluster.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

# In a file's name, the id of the driver's first trial is between the two: a folder may hold several searches.
METADATA_PREFIX, METADATA_SUFFIX = "horovod_tune_run-", ".json"
_PACKAGES = ("horovod_tune", "ray", "torch", "horovod", "torch_xla", "bayesian-optimization")
_MOST_PARAMETERS, _LONGEST_TEXT = 5_000, 300


def write_metadata(trial: Any, known: Mapping[str, Any]) -> None:
    """Write metadata of the search that starts `trial`; Tune copies the driver's folder to the storage.

    What another callback wrote for the same search is kept unless `known` overrides it. Raises `OSError`.
    """
    if trial.storage is None:
        return
    folder = Path(trial.storage.experiment_driver_staging_path)
    place = folder / f"{METADATA_PREFIX}{trial.trial_id}{METADATA_SUFFIX}"
    folder.mkdir(parents=True, exist_ok=True)
    before = json.loads(place.read_text()) if place.exists() else {}
    bundles = getattr(trial.placement_group_factory, "bundles", [])
    written = before | environment() | {"resources": bundles, "written": time.time()}
    written |= {name: value for name, value in known.items() if value is not None}
    partial = folder / f".{place.name}.{os.getpid()}"
    partial.write_text(json.dumps(written))
    partial.replace(place)


def write_end(trial: Any) -> None:
    """Record in a search's metadata that it has ended; `trial` is its driver's first. Raises `OSError`.

    This is written to the storage itself: Tune has already copied the driver's folder for the last time.
    """
    if trial.storage is None:
        return
    name = f"{METADATA_PREFIX}{trial.trial_id}{METADATA_SUFFIX}"
    written = json.loads((Path(trial.storage.experiment_driver_staging_path) / name).read_text())
    place = f"{trial.storage.experiment_fs_path}/{name}"
    with trial.storage.storage_filesystem.open_output_stream(place) as file:
        file.write(json.dumps(written | {"ended": True}).encode())


def environment() -> dict[str, Any]:
    """Return the versions of Python and packages, and the cluster's size, as plain data."""
    versions = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"versions": versions, "cluster": _cluster()}


def _cluster() -> dict[str, Any]:
    import ray

    if not ray.is_initialized():
        return {}
    resources = ray.cluster_resources()
    shown = {name: resources[name] for name in ("CPU", "GPU", "TPU") if name in resources}
    nodes = sum(1 for node in ray.nodes() if node.get("Alive"))
    memory = {"GB of memory": round(resources["memory"] / 1e9, 1)} if "memory" in resources else {}
    return {"nodes": nodes, **shown, **memory, "system": f"{platform.system()} {platform.machine()}"}


def space_metadata(config: Any) -> dict[str, Any]:
    """Return the domains of a search space by flat name (`net/width`), and its constants.

    >>> space_metadata({"net": {"layers": {"grid_search": [1, 2]}, "act": "relu"}})["constants"]
    {'net/act': 'relu'}
    """
    space: dict[str, Any] = {}
    constants: dict[str, Any] = {}

    def visit(path: str, value: Any) -> None:
        if len(space) + len(constants) >= _MOST_PARAMETERS:
            return
        if isinstance(value, dict) and set(value) == {"grid_search"}:
            values = [_plain(each) for each in value["grid_search"]]
            space[path] = {"kind": "categorical", "text": f"grid_search({values!r})"}
        elif isinstance(value, dict):
            for key, inner in value.items():
                visit(f"{path}/{key}" if path else str(key), inner)
        elif isinstance(value, (list, tuple)):
            for index, inner in enumerate(value):
                visit(f"{path}/{index}", inner)
        elif hasattr(value, "sampler") and hasattr(value, "is_valid"):  # one of Tune's domains
            space[path] = _domain(value)
        else:
            constants[path] = _plain(value)

    visit("", config if isinstance(config, dict) else {})
    return {"space": space, "constants": constants}


def _plain(value: Any) -> Any:
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return value if is_plain else str(value)[:_LONGEST_TEXT]


def _domain(domain: Any) -> dict[str, Any]:
    kind, sampler, step = type(domain).__name__, domain.sampler, None
    if type(sampler).__name__ == "Quantized":
        sampler, step = sampler.sampler, sampler.q
    if kind == "Categorical":
        values = [_plain(value) for value in domain.categories]
        return {"kind": "categorical", "text": f"choice({values!r})"}
    if kind not in ("Float", "Integer"):
        return {"kind": "other", "text": "sample_from(…)"}
    name = type(sampler).__name__
    if "Normal" in name:
        return {"kind": "float", "text": f"randn({sampler.mean}, {sampler.sd})"}
    log = "LogUniform" in name
    function = f"{'q' if step else ''}{'log' if log else ''}{'randint' if kind == 'Integer' else 'uniform'}"
    ends = [str(end).removesuffix(".0") for end in (domain.lower, domain.upper, step) if end is not None]
    return {"kind": kind.lower(), "text": f"{function}({', '.join(ends)})", "log": log}
