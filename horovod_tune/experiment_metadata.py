"""What a search writes about itself in JSON: the driver writes it, `analyze` reads it.

Our file has the metric, mode, space, searcher, scheduler, resources, package versions and the size of the
cluster, which Tune writes only in pickles, or not at all.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("horovod_tune", "ray", "torch", "horovod", "torch_xla", "bayesian-optimization")
_MOST_CONSTANTS, _LONGEST_TEXT = 5_000, 300


def file_name(trial_id: str) -> str:
    """Return the name of a search's file, by its driver's first trial: a folder may hold several searches."""
    return f"horovod_tune_run-{trial_id}.json"


def write_metadata(trial: Any, facts: Mapping[str, Any]) -> None:
    """Write metadata of the search that starts `trial`; Tune copies the driver's folder to the storage.

    What another callback wrote for the same search is kept unless `facts` overrides it. Raises `OSError`.
    """
    folder = Path(trial.storage.experiment_driver_staging_path)
    place = folder / file_name(trial.trial_id)
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
    name = file_name(trial.trial_id)
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
