"""Queries of Ray's private state: nodes, reports, limits and directories."""

from __future__ import annotations

import importlib
import json
import logging
import math
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from horovod_tune.compatibility import Patch
from horovod_tune.errors import TrainingFailed
from horovod_tune.spec.placement import Placement, check_fits

logger = logging.getLogger(__name__)

_STATE = "ray._private.state:state"
# Allowance for what a pickled trainable class has besides its function: a few thousand bytes in practice.
_BYTES_OF_A_CLASS = 100_000
_DRAINING = Patch(
    "the preemption of a trial's node counts as a failure of the trial, and near a job's time limit, trials "
    "that call commit() but report no checkpoints save nothing",
    f"{_STATE}.get_draining_nodes",
    f"{_STATE}.available_resources_per_node",
    "ray.core.generated.common_pb2:NodeDeathInfo.Reason",
    "ray._raylet:InnerGcsClient.internal_kv_put(self, key, value, overwrite, namespace, timeout)",
    "ray.experimental.internal_kv:_internal_kv_get(key, namespace)",
)
# That of our keys in Ray's key-value store, and the key that `announce_end` sets.
_NAMESPACE = b"horovod_tune"
_ALL_NODES_DRAIN = (b"all_nodes_go", _NAMESPACE)


@Patch(
    "checkpoints and logs reach the driver only if all hosts share the storage path",
    f"{_STATE}.job_table",
).otherwise(None)
def driver_node_id() -> str | None:
    """Return the id of the Ray node that this job's driver runs on, or None if Ray has no entry for it."""
    from ray._private.state import state

    job = ray.get_runtime_context().get_job_id()
    addresses = {entry["DriverIPAddress"] for entry in state.job_table() if entry["JobID"] == job}
    nodes = (node for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] in addresses)
    return next((node["NodeID"] for node in nodes), None)


@Patch(
    "after Tuner.restore, PromotingASHA has only the last report of each trial",
    "ray.tune.experiment:Trial uses storage",
    "ray.train._internal.storage:StorageContext uses storage_filesystem trial_fs_path",
).otherwise(b"")
def stored_results(trial: Any) -> bytes:
    """Return a trial's result.json in the storage: Tune itself keeps only a trial's last report."""
    path = f"{trial.storage.trial_fs_path}/result.json"
    try:
        with trial.storage.storage_filesystem.open_input_stream(path) as file:
            return bytes(file.readall())
    except OSError as error:
        logger.warning("the earlier reports of trial %s cannot be read: %s", trial.trial_id, error)
        return b""


@Patch(
    "a trial that no machine can ever hold waits instead of being refused",
    "ray._private.ray_constants:DEBUG_AUTOSCALING_STATUS",
    "ray.experimental.internal_kv:_internal_kv_get(key, namespace)",
    "ray._private.worker:_global_node",
    "ray._private.node:Node.is_head",
).otherwise(True)
def cluster_can_grow() -> bool:
    """Return True if an autoscaler may add nodes, so that the present nodes do not limit what can ever fit.

    Autoscaler v2 labels nodes with their type (under `ray up`, the head from the start); v1 publishes the
    types of its active nodes and which nodes are pending. A head without a cluster file also runs a monitor,
    which gives each node a type of its own, ``node_`` and an id. The provider ``local`` cannot grow beyond
    the machines in its file, but `ray up` returns before these have joined. A new head has published nothing
    yet.
    """
    from ray._private import worker
    from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
    from ray.experimental.internal_kv import _internal_kv_get

    types = {node.get("Labels", {}).get("ray.io/node-group") for node in ray.nodes() if node["Alive"]}
    status = json.loads(_internal_kv_get(DEBUG_AUTOSCALING_STATUS) or b"{}")
    report = status.get("autoscaler_report") or {}
    if report.get("pending_nodes") or report.get("pending_launches"):
        return True
    here = worker._global_node
    if not report and (here is None or not here.is_head()):  # this process did not start the cluster
        return True
    types.update(report.get("active_nodes") or {})
    return any(name and name != "local.cluster.node" and not name.startswith("node_") for name in types)


@Patch(
    "a training function that is too large to be sent ends the search with Ray's own error",
    "ray._private.ray_constants:FUNCTION_SIZE_ERROR_THRESHOLD",
).otherwise(math.inf)
def most_bytes_of_a_function() -> float:
    """Return the maximum size in bytes of a pickled training function, which is part of an actor's class."""
    from ray._private.ray_constants import FUNCTION_SIZE_ERROR_THRESHOLD

    return float(FUNCTION_SIZE_ERROR_THRESHOLD - _BYTES_OF_A_CLASS)


@Patch(
    "resume_or_start does not warn of a num_samples that is not used",
    "ray.tune:Tuner uses _local_tuner",
    "ray.tune.impl.tuner_internal:TunerInternal uses _tune_config num_samples",
).otherwise(None)
def num_samples_of(tuner: Any) -> int | None:
    """Return the `num_samples` of a restored tuner; None through Ray Client."""
    local = getattr(tuner, "_local_tuner", None)
    return None if local is None else int(local._tune_config.num_samples)


@Patch(
    "a trial whose function returned long after its last report is shown as stopped by analyze()",
    "ray.tune.experiment.trial:Trial uses run_metadata invalidate_cache",
).otherwise(None)
def store_end(trial: Any) -> None:
    """Make Tune store a trial's last result again: it marks it as the last in a dict already serialised."""
    trial.run_metadata.invalidate_cache()


def resources_of_nodes() -> list[dict[str, float]]:
    """Return the resources of each live node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def cluster_size() -> str | None:
    """Return the cluster's nodes and resources as text; None if this driver has no cluster yet."""
    if not ray.is_initialized():
        return None
    nodes = resources_of_nodes()
    amounts = {name: sum(node.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU", "TPU")}
    held = ", ".join(f"{amount:g} {name}s" for name, amount in amounts.items() if amount)
    return f"{len(nodes)} {'node' if len(nodes) == 1 else 'nodes'} with {held or 'no CPUs'}"


def check_cluster_holds(placement: Placement) -> None:
    """Raise ResourcesUnavailable if this driver is connected to a cluster that can never hold the bundles."""
    if ray.is_initialized() and not cluster_can_grow():
        check_fits(placement, resources_of_nodes())


@_DRAINING.otherwise(set())
def draining_nodes() -> set[str]:
    """Return the ids of the draining nodes: those that Ray drains, or all after `announce_end`."""
    from ray._private.state import state
    from ray.experimental.internal_kv import _internal_kv_get

    key, namespace = _ALL_NODES_DRAIN
    if _internal_kv_get(key, namespace=namespace):
        return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    return set(state.get_draining_nodes())


@_DRAINING.otherwise({})
def free_on_remaining_nodes() -> dict[str, dict[str, float]]:
    """Return the free resources of each node that is not draining, by the nodes' ids."""
    from ray._private.state import state

    draining = draining_nodes()
    free = state.available_resources_per_node()
    return {node: dict(amounts) for node, amounts in free.items() if node not in draining}


@_DRAINING.otherwise(False)
def is_preempted(node_ids: Iterable[str]) -> bool:
    """Return True if one of these nodes was preempted, or is about to be.

    Ray reports a lost actor as unavailable before it reports its node as dead, so this checks the nodes, not
    the actors' errors: a draining node counts as preempted, like a node that died after draining.
    """
    wanted = set(node_ids)
    if not wanted:
        return False
    if wanted & draining_nodes():
        return True
    common_pb2: Any = importlib.import_module("ray.core.generated.common_pb2")  # compiled, without types
    taken_away = common_pb2.NodeDeathInfo.Reason.Value("AUTOSCALER_DRAIN_PREEMPTED")
    dead = [node for node in ray.nodes() if node["NodeID"] in wanted and not node["Alive"]]
    return any(node.get("DeathReason") == taken_away for node in dead)


class HostPreempted(TrainingFailed, RayActorError):
    """A rank's host was preempted: Tune starts the trial again without counting this as a failure.

    Tune (2.60) does not count a failure against `max_failures` if the trial's step ends with a
    `RayActorError` whose `preempted` is true, including one that the trainable itself raises.
    """

    def __init__(self, message: str) -> None:
        RayActorError.__init__(self, error_msg=message, preempted=True)
        self.args = (message,)

    def __str__(self) -> str:
        return str(self.args[0])


@Patch(
    "each coordinator of a search logs what only the first one needs to",
    "ray.experimental.internal_kv:_internal_kv_put(key, value, overwrite, namespace)",
).otherwise(True)
def is_first(what: str) -> bool:
    """Return True for one call per ``what`` in this job, whichever process makes it."""
    from ray.experimental.internal_kv import _internal_kv_put

    if not ray.is_initialized():
        return True
    key = f"first {ray.get_runtime_context().get_job_id()} {what}"
    # It returns True if the key has a value already.
    return not _internal_kv_put(key, b"1", overwrite=False, namespace=_NAMESPACE)


def announce_end(address: str) -> None:
    """Announce to the trials of the Ray cluster at ``address`` (HOST:PORT) that all nodes are about to end.

    Ray's own draining is not used: a drained node ends as soon as it is idle, and if the head is drained, the
    search ends with it.

    Raises:
        RuntimeError: this version of Ray lacks the private calls that this needs.
        ray.exceptions.RaySystemError: the head does not respond.
    """
    if not _DRAINING.fits:
        raise RuntimeError(_DRAINING.without)
    _raylet: Any = importlib.import_module("ray._raylet")  # compiled, without types
    key, namespace = _ALL_NODES_DRAIN
    _raylet.GcsClient(address=address).internal_kv_put(key, b"1", True, namespace, timeout=30)


@Patch(
    "each process fetches its own copy of a checkpoint from another host",
    "ray._private.worker:_global_node",
    "ray._private.node:Node.get_session_dir_path(self)",
).otherwise(None)
def private_directory() -> Path | None:
    """Return a directory of this Ray session on this host that only this user may enter.

    None in a process without a session (a Ray Client), or if the directory cannot be made: the session's
    directory is not writable, or another user has made this directory.
    """
    node = ray._private.worker._global_node
    session = Path(node.get_session_dir_path()) if node is not None else None
    if session is None or not session.is_dir():
        return None
    path = session / f"horovod_tune_{os.geteuid()}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    # Any user may write to Ray's own directory.
    facts = path.lstat()
    is_ours = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077
    return path if is_ours else None
