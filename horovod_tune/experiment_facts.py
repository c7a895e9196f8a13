"""Runs in the driver: leaves in an experiment's folder what Tune writes nowhere.

That is the metric, the mode and the rungs of `tune.run`, the versions of what trains and the size of the
cluster; `analyze` and the report read it.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import socket
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

# Between the two stands the first trial that the driver started: a folder may hold several searches.
FACTS_PREFIX, FACTS_SUFFIX = "horovod_tune_run-", ".json"
_PACKAGES = ("horovod_tune", "ray", "torch", "horovod", "torch_xla", "bayesian-optimization")


def write_facts(
    trial: Any, metric: str | None, mode: str | None, rungs: tuple[str, Sequence[float]] | None = None
) -> None:
    """Leave the facts beside Tune's files; Tune copies the driver's folder to the storage.

    `rungs` are the `time_attr` that the scheduler goes by and the times at which it decides, where they are
    known.

    A metric and rungs that somebody has written for this trial stay where none are given.
    """
    if trial.storage is None:
        return
    folder = Path(trial.storage.experiment_driver_staging_path)
    place = folder / f"{FACTS_PREFIX}{trial.trial_id}{FACTS_SUFFIX}"
    time_attr, times = rungs or (None, ())
    facts = run_facts() | {"metric": metric, "mode": mode, "time_attr": time_attr, "rungs": list(times)}
    known = _read(place)
    if metric is None:
        facts |= {name: known.get(name) for name in ("metric", "mode")}
    if rungs is None:
        facts |= {"time_attr": known.get("time_attr"), "rungs": known.get("rungs", [])}
    partial = folder / f".{place.name}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(facts))
        partial.replace(place)
    except OSError as error:
        logger.warning("the facts of the experiment cannot be written to %s: %s", place, error)


def _read(place: Path) -> dict[str, Any]:
    try:
        known = json.loads(place.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def run_facts() -> dict[str, Any]:
    """The versions of what trains, and the size of the machine and the cluster, as plain data."""
    versions = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {"versions": versions, "cluster": _cluster(), "driver": socket.gethostname()}


def _cluster() -> dict[str, Any]:
    import ray

    if not ray.is_initialized():
        return {}
    resources = ray.cluster_resources()
    shown = {name: resources[name] for name in ("CPU", "GPU", "TPU") if name in resources}
    nodes = sum(1 for node in ray.nodes() if node.get("Alive"))
    memory = {"GB of memory": round(resources["memory"] / 1e9, 1)} if "memory" in resources else {}
    return {"nodes": nodes, **shown, **memory, "system": f"{platform.system()} {platform.machine()}"}
