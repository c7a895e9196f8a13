"""Everything private of Ray that this package touches, in one place. Checked against Ray 2.60.0.

- the module-level session behind ``ray.tune.report`` and its friends (`lend_session`),
- Tune's switch for actor reuse (`reuse_actors_of`), its cache of actor classes (`start_in_idle_processes`),
- a stop that Tune notes for a trial it only pauses (`forget_stops_of_paused_trials`),
- the loggers' way of resuming a result file (`keep_longer_results`),
- which node a job's driver runs on (`driver_node_id`), Ray's directory on a host (`session_directory`),
- the directories of a trial in Tune's StorageContext (`storage_reaches_here`),
- whether the cluster can grow (`cluster_can_grow`),
- nodes that their cloud takes away (`is_preempted`, `drain_as_preempted`).
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import json
import os
import pickle
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from horovod_tune.session import Session, current

_SESSION_MODULE = "ray.train._internal.session"
_REPORT_MODULE = "ray.tune.trainable.trainable_fn_utils"
LIGHTNING_VARIABLE = {"PL_DISABLE_FORK": "1"}
"""What Tune sets in the processes of every trial."""


class _TrialFacts:
    """What ``ray.tune.get_context()`` and ``ray.tune.report`` ask their session for."""

    def __init__(self, session: Session) -> None:
        order, world = session.order, session.world
        self._session = session
        self.trial_id = order.trial_id
        self.trial_name = order.trial_name
        self.trial_dir = order.trial_dir
        self.experiment_name = order.experiment_name
        self.run_id = None
        self.world_rank = world.rank
        self.world_size = world.size
        self.local_rank = world.local_rank
        self.local_world_size = world.local_size
        self.node_rank = world.cross_rank
        self.metadata: dict[str, Any] = {}
        self.accelerator = None

    @property
    def trial_resources(self) -> Any:
        return pickle.loads(self._session.order.resources)

    @property
    def loaded_checkpoint(self) -> Any:
        return (current() or self._session).get_checkpoint()

    def report(self, metrics: Mapping[str, Any], checkpoint: Any = None, **_: Any) -> None:
        (current() or self._session).report(metrics, checkpoint)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs a function right after one of some modules is imported; importing ray.tune costs 0.6 s, so a
    rank does not do it before the training function does."""

    def __init__(self, hooks: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._hooks = dict(hooks)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        hook = self._hooks.get(fullname)
        if hook is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            hook(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_lent: _TrialFacts | None = None


def lend_session(session: Session | None) -> None:
    """Let ``ray.tune.report`` and its friends in this process speak to ``session``; None takes it back."""
    global _lent
    _lent = None if session is None else _TrialFacts(session)
    module = sys.modules.get(_SESSION_MODULE)
    if module is not None:
        _lend(module)


def _lend(module: ModuleType) -> None:
    module._session = _lent  # type: ignore[attr-defined]


def _accept_keywords(module: ModuleType) -> None:
    """Let ``ray.tune.report(loss=1)`` of the old guides work again inside a rank."""
    original = module.report

    @functools.wraps(original)
    def report(metrics: Mapping[str, Any] | None = None, *, checkpoint: Any = None, **keywords: Any) -> None:
        original({**(metrics or {}), **keywords}, checkpoint=checkpoint)

    module.report = report  # type: ignore[attr-defined]
    tune = sys.modules.get("ray.tune")
    if tune is not None and getattr(tune, "report", None) is original:
        tune.report = report  # type: ignore[attr-defined]


def _register_serializers_when_needed() -> None:
    """Let Ray register its serializers for other libraries' types once one of these libraries is imported.

    Otherwise it imports Pydantic and Arrow for that with the first answer of an actor: a tenth of a second in
    each rank, which few training functions need.
    """
    from ray.util import serialization_addons

    register = serialization_addons.apply
    libraries = ("pydantic", "pyarrow", "starlette")

    @functools.wraps(register)
    def apply(context: Any) -> None:
        if any(name in sys.modules for name in libraries):
            register(context)
            return
        finder = _AfterImport(dict.fromkeys(libraries, lambda _: now()))

        def now() -> None:
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)
                register(context)

        sys.meta_path.insert(0, finder)

    serialization_addons.apply = apply


def prepare_rank_process() -> None:
    """Install the hooks of this process, once, before the first training function."""
    os.environ.update(LIGHTNING_VARIABLE)
    _register_serializers_when_needed()
    hooks = {_SESSION_MODULE: _lend, _REPORT_MODULE: _accept_keywords}
    waiting = {}
    for name, hook in hooks.items():
        module = sys.modules.get(name)
        if module is None:
            waiting[name] = hook
        else:
            hook(module)
    if waiting:
        sys.meta_path.insert(0, _AfterImport(waiting))


def reuse_actors_of(wants_reuse: Callable[[type], bool]) -> None:
    """Make Tune keep the actors of trainables that want it, whatever ``reuse_actors`` says; once a process.

    Tune refuses actor reuse together with ResourceChangingScheduler, which is therefore left alone, and
    tells cached actors apart by resources only, so an experiment of several trainables is left alone too.

    Tune also ends the actor of a trial that pauses when no other trial is staged at that moment, though the
    trial goes on later: with population-based training, every exploit would meet new workers. Ours are kept
    while a trial is paused or pending.
    """
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.registry import get_trainable_cls

    if hasattr(TuneController._maybe_cache_trial_actor, "_horovod_tune"):
        return
    original = TuneController._maybe_cache_trial_actor
    # By experiment: the next one of this process may have another trainable of the same name.
    wanted: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    @functools.wraps(original)
    def maybe_cache(self: Any, trial: Any) -> bool:
        if self not in wanted and {each.trainable_name for each in self._trials} == {trial.trainable_name}:
            wanted[self] = wants_reuse(get_trainable_cls(trial.trainable_name))
            if wanted[self] and type(self._scheduler_alg).__name__ != "ResourceChangingScheduler":
                self._reuse_actors = True
        if not (wanted.get(self) and self._reuse_actors) or self._staged_trials:
            return original(self, trial)
        if not (pausing.get(self) is trial or waits_for_an_actor(self)):
            return original(self, trial)
        # As if this trial were staged: then Tune keeps as many actors as there are such trials.
        self._staged_trials.add(trial)
        resources, room = trial.placement_group_factory, self._actor_cache.num_cached_objects + 1
        self._actor_cache.increase_max(resources, room)
        try:
            return original(self, trial)
        finally:
            self._actor_cache.decrease_max(resources, room)
            self._staged_trials.discard(trial)

    original_pause = TuneController._schedule_trial_pause
    pausing: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    @functools.wraps(original_pause)
    def pause(self: Any, trial: Any, should_checkpoint: bool = True) -> None:
        pausing[self] = trial
        try:
            original_pause(self, trial, should_checkpoint)
        finally:
            pausing.pop(self, None)

    def waits_for_an_actor(controller: Any) -> bool:
        return any(each.status in ("PAUSED", "PENDING") for each in controller._trials)

    original_cleanup = TuneController._cleanup_cached_actors

    @functools.wraps(original_cleanup)
    def cleanup(self: Any, force_all: bool = False) -> None:
        ours = self._reuse_actors and wanted.get(self)
        if force_all or not (ours and waits_for_an_actor(self)):
            original_cleanup(self, force_all)

    maybe_cache._horovod_tune = True  # type: ignore[attr-defined]
    TuneController._maybe_cache_trial_actor = maybe_cache  # type: ignore[method-assign]
    TuneController._schedule_trial_pause = pause  # type: ignore[method-assign]
    TuneController._cleanup_cached_actors = cleanup  # type: ignore[method-assign]


def forget_stops_of_paused_trials() -> None:
    """Let a trial that pauses while it is being saved go on later; once a process.

    PopulationBasedTraining(synch=True) pauses a weak trial when the last of the others reports, which may be
    while the weak one is still being saved. Tune then notes that the trial is to stop once that is over, and
    drops the save: the note stops the trial at its next checkpoint, and the others wait for it for ever.
    """
    from ray.tune.execution.tune_controller import TuneController

    if hasattr(TuneController.pause_trial, "_horovod_tune"):
        return
    original = TuneController.pause_trial

    @functools.wraps(original)
    def pause(self: Any, trial: Any, should_checkpoint: bool = True) -> None:
        original(self, trial, should_checkpoint)
        if not should_checkpoint and trial.status == "PAUSED":
            self._cached_trial_decisions.pop(trial.trial_id, None)

    pause._horovod_tune = True  # type: ignore[attr-defined]
    TuneController.pause_trial = pause  # type: ignore[method-assign]


def keep_longer_results() -> None:
    """Stop Tune from replacing a restarted trial's results with an older copy; once a process.

    When a trial starts again, Tune's loggers fetch its result file from the storage over the local one. In
    the driver that wrote it, the copy in the storage is behind by what was not synced yet (or as long), so
    results of the trial's first attempt would be lost.
    """
    from ray.tune.logger import LoggerCallback

    if hasattr(LoggerCallback._restore_from_remote, "_horovod_tune"):
        return
    original = LoggerCallback._restore_from_remote

    @functools.wraps(original)
    def restore(self: Any, file_name: str, trial: Any) -> None:
        local = Path(trial.local_path, file_name)
        stored = trial.storage.storage_filesystem.get_file_info(
            Path(trial.storage.trial_fs_path, file_name).as_posix()
        )
        if not local.exists() or local.stat().st_size < (stored.size or 0):
            original(self, file_name, trial)

    restore._horovod_tune = True  # type: ignore[attr-defined]
    LoggerCallback._restore_from_remote = restore  # type: ignore[method-assign]


def start_in_idle_processes(is_ours: Callable[[type], bool]) -> None:
    """Let the coordinators of trials, and so their training actors, start in processes that Ray keeps ready.

    Tune gives every trainable a runtime environment with a variable for Lightning in it, and a process with
    another environment than the driver's has to be started first: two starts, one after the other, in each
    first trial. Ours set that variable themselves (`LIGHTNING_VARIABLE`). Where the driver has variables that
    Tune passes on (credentials), its way is left as it is. Once a process.
    """
    import ray
    from ray.tune.execution import class_cache

    cache_class = class_cache._ActorClassCache
    if hasattr(cache_class.get, "_horovod_tune"):
        return
    original = cache_class.get

    @functools.wraps(original)
    def get(self: Any, trainable_cls: type) -> Any:
        passed_on = class_cache.ENV_VARS_TO_PROPAGATE & set(os.environ)
        known = class_cache.DEFAULT_ENV_VARS == LIGHTNING_VARIABLE
        if trainable_cls not in self._cache and is_ours(trainable_cls) and known and not passed_on:
            self._cache[trainable_cls] = ray.remote(trainable_cls)
        return original(self, trainable_cls)

    get._horovod_tune = True  # type: ignore[attr-defined]
    cache_class.get = get  # type: ignore[method-assign]


def name_lost_hosts(is_ours: Callable[[type], bool]) -> None:
    """Put the host's name into the error of a trial whose coordinator was lost; once a process.

    Nobody of the trial is left to tell then, and Ray's own text has the host's address only.
    """
    import ray
    from ray.exceptions import RayActorError
    from ray.tune.execution.tune_controller import TuneController
    from ray.tune.registry import get_trainable_cls

    if hasattr(TuneController._process_trial_failure, "_horovod_tune"):
        return
    original = TuneController._process_trial_failure

    @functools.wraps(original)
    def process(self: Any, trial: Any, exception: Any) -> None:
        lost = isinstance(exception, RayActorError) and re.search(r"\bip: (\S+)", str(exception))
        if lost and is_ours(get_trainable_cls(trial.trainable_name)):
            hosts = {node["NodeManagerAddress"]: node["NodeManagerHostname"] for node in ray.nodes()}
            host = hosts.get(lost[1], lost[1])
            exception.error_msg = f"the coordinator on {host}, beside rank 0, was lost:\n{exception}"
        original(self, trial, exception)

    process._horovod_tune = True  # type: ignore[attr-defined]
    TuneController._process_trial_failure = process  # type: ignore[method-assign]


def session_directory() -> Path | None:
    """Return the directory of this Ray session on this host, in a process that Ray started; else None."""
    import ray

    node = getattr(ray._private.worker, "_global_node", None)
    path = Path(node.get_session_dir_path()) if node is not None else None
    return path if path is not None and path.is_dir() else None


def driver_node_id() -> str | None:
    """Return the id of the Ray node that this job's driver runs on, None where Ray does not tell."""
    import ray
    from ray._private.state import state

    job = ray.get_runtime_context().get_job_id()
    for entry in state.job_table():
        if entry["JobID"] == job:
            for node in ray.nodes():
                if node["NodeManagerAddress"] == entry["DriverIPAddress"] and node["Alive"]:
                    return node["NodeID"]
    return None


def storage_reaches_here(storage: Any) -> bool:
    """Whether this host can write where the driver made the experiment's directory."""
    try:
        storage._check_validation_file()
    except RuntimeError:
        return False
    return True


def cluster_can_grow() -> bool:
    """Whether an autoscaler may add nodes, so that today's nodes say nothing about what can ever fit.

    Ray has no question for that. Under an autoscaler of the second version nodes carry their type as a label,
    the head of `ray up` from the start; one of the first publishes the types of its nodes. A head without a
    cluster file has a monitor too, which calls its nodes ``node_`` and their id; the provider ``local`` has
    the machines that its file names and no more.
    """
    import ray
    from ray._private.ray_constants import DEBUG_AUTOSCALING_STATUS
    from ray.experimental.internal_kv import _internal_kv_get

    types = {node.get("Labels", {}).get("ray.io/node-group") for node in ray.nodes() if node["Alive"]}
    status = json.loads(_internal_kv_get(DEBUG_AUTOSCALING_STATUS) or b"{}")
    types.update((status.get("autoscaler_report") or {}).get("active_nodes") or {})
    return any(name and name != "local.cluster.node" and not name.startswith("node_") for name in types)


def is_preempted(node_ids: Iterable[str]) -> bool:
    """Return whether one of these nodes was taken away, or is about to be.

    Ray calls a lost actor unavailable before it calls its node dead, so the nodes are asked about, not the
    actors' errors: one that is being drained counts as much as one that died after that.
    """
    import ray
    from ray._private.state import state

    wanted = set(node_ids)
    if not wanted:
        return False
    if wanted & set(state.get_draining_nodes()):
        return True
    common_pb2: Any = importlib.import_module("ray.core.generated.common_pb2")  # compiled, without types
    taken_away = common_pb2.NodeDeathInfo.Reason.Value("AUTOSCALER_DRAIN_PREEMPTED")
    return any(
        node["NodeID"] in wanted and not node["Alive"] and node.get("DeathReason") == taken_away
        for node in ray.nodes()
    )


def drain_as_preempted(address: str, node_address: str, *, in_s: float) -> list[str]:
    """Let Ray drain the nodes at `node_address` as pre-empted; return their ids.

    It is what the hidden command ``ray drain-node`` does.

    Args:
        address: of the head, HOST:PORT.
        node_address: the one that Ray knows this machine by.
        in_s: in how many seconds the machine goes.

    Raises:
        RuntimeError: no alive node has that address, or Ray refuses.
    """
    # Compiled modules without types.
    _raylet: Any = importlib.import_module("ray._raylet")
    autoscaler_pb2: Any = importlib.import_module("ray.core.generated.autoscaler_pb2")
    gcs_pb2: Any = importlib.import_module("ray.core.generated.gcs_pb2")

    gcs = _raylet.GcsClient(address=address)
    nodes = [
        node_id.hex()
        for node_id, info in gcs.get_all_node_info(timeout=30).items()
        if info.node_manager_address == node_address and info.state == gcs_pb2.GcsNodeInfo.GcsNodeState.ALIVE
    ]
    if not nodes:
        raise RuntimeError(f"no alive node of {address} has the address {node_address}")
    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int((time.time() + in_s) * 1000)
    for node in nodes:
        accepted, why = gcs.drain_node(node, reason, "the cloud takes the machine away", deadline_ms)
        if not accepted:
            raise RuntimeError(f"Ray refuses to drain {node}: {why}")
    return nodes
