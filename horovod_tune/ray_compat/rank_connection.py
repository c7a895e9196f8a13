"""Runs in each rank: connects it to the cluster of its search, when its training function first uses Ray.

Nothing of Ray is started for functions that do not use it. A rank is a driver to Ray: its tasks and actors
run outside the trial's placement group, and end with the rank.
"""

from __future__ import annotations

import atexit
import functools
import io
import logging
import os
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any

import ray

from horovod_tune.compatibility import Patch, wrap
from horovod_tune.messages import RayAddress

logger = logging.getLogger(__name__)

_AUTO_INIT = Patch(
    "a training function has to call ray.init() before it uses Ray",
    "ray._private.auto_init_hook:auto_init_ray()",
    "ray._private.auto_init_hook:wrap_auto_init uses auto_init_ray",
)
# Functions of Ray that do not call `auto_init_ray`.
_OTHERS = ("nodes", "cluster_resources", "available_resources", "timeline", "get_runtime_context")
_LAUNCH_HOOKS = Patch(
    "a task or actor that requests CPUs which the trials hold waits without a warning",
    "ray.remote_function:_task_launch_hook",
    "ray.actor:_actor_launch_hook",
    "ray.remote_function:RemoteFunction._remote uses _task_launch_hook _function_descriptor",
)
# What unpickling a reference, or the handle of an actor, calls: it needs the connection.
_NEED_A_CONNECTION = ("_object_ref_deserializer", "_actor_handle_deserializer", "_rdt_ref_deserializer")

_CLASS_IDS = Patch(
    "ranks start as new programs after the import of a module that defines Ray actors, such as ray.tune",
    "ray.actor:_make_actor uses ActorClassID from_random",
)

_address: RayAddress | None = None
_has_warned = False
# Threads may use Ray at once. Reentrant, since Ray may call `connect` while it connects.
_connecting = threading.RLock()


class _ClassIds:
    """Makes the ids of actor classes without Ray's generator of random numbers."""

    @staticmethod
    def from_random() -> Any:
        return ray.ActorClassID(os.urandom(ray.ActorClassID.size()))


def prepare_process() -> None:
    """Install the hooks of this process and its forks. Checks of Ray's source take a rank 10 ms."""
    if _CLASS_IDS.fits:  # imports would use Ray's generator here: all forks would then draw the same ids
        ray.actor.ActorClassID = _ClassIds  # type: ignore[misc,assignment]
    if _AUTO_INIT.fits:
        ray._private.auto_init_hook.auto_init_ray = connect
    wrap(ray, "init")(_join)
    for name in _OTHERS:
        wrap(ray, name)(_connect_first)
    wrap(ray, "get_gpu_ids")(_gpu_ids)
    if _LAUNCH_HOOKS.fits:
        ray.remote_function._task_launch_hook = _warn_of_long_waits  # type: ignore[assignment]
        ray.actor._actor_launch_hook = _warn_of_long_waits  # type: ignore[assignment]


def forks_share_ids() -> bool:
    """Return True if two forks of this process would draw the same ids, and so be one worker to Ray."""
    drawn = []
    for _ in range(2):
        reads, writes = os.pipe()
        pid = os.fork()
        if not pid:
            os.write(writes, ray.WorkerID.from_random().binary())
            os._exit(0)
        os.waitpid(pid, 0)
        os.close(writes)
        with open(reads, "rb") as file:
            drawn.append(file.read())
    return drawn[0] == drawn[1]


def set_cluster(address: RayAddress) -> None:
    """Make this process connect to ``address`` on first use, whichever API of Ray that is."""
    global _address
    _address = address
    os.environ["RAY_ADDRESS"] = address.address  # for `ray.init()` in the function


def connect() -> None:
    """Connect to the cluster of the search, unless that has been done."""
    with _connecting:
        if _address is None or ray.is_initialized():
            return
        ray.init(
            address=_address.address,
            namespace=_address.namespace,
            runtime_env=_address.runtime_env or None,
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.WARNING,
        )


def _join(original: Callable[..., Any], address: str | None = None, **arguments: Any) -> Any:
    """Do what `ray.init` does in the training function, in the search's cluster and namespace.

    Raises:
        RuntimeError: ``address`` is "local", which starts a cluster.
    """
    if address == "local":
        raise RuntimeError(
            "ray.init(address='local') starts a cluster, which a rank must not do: leave the address out to "
            "use the search's own, or call ray.init in the driver only"
        )
    if address in (None, "auto") and _address is not None:
        address = _address.address
        arguments.setdefault("namespace", _address.namespace)
        arguments.setdefault("runtime_env", _address.runtime_env or None)
    return original(address, **arguments)


def prepare_exit() -> None:
    """Leave out Ray's `atexit` handler, which takes 16 ms, in a process that has not used Ray."""
    if not ray.is_initialized():
        atexit.unregister(ray.shutdown)


def _connect_first(original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    connect()
    return original(*arguments, **keywords)


def _gpu_ids(original: Callable[..., Any]) -> Any:
    return original() if _address is None else list(_address.gpu_ids)


# The globals of the functions that were unpickled here.
_namespaces: list[dict[str, Any]] = []


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes) -> None:
        super().__init__(io.BytesIO(pickled))
        # The globals of the functions in it.
        self.namespaces: list[dict[str, Any]] = []

    def find_class(self, module_name: str, name: str, /) -> Any:
        if name in _NEED_A_CONNECTION:
            connect()
        found = super().find_class(module_name, name)
        return functools.partial(self._make, found) if name == "_make_function" else found

    def _make(
        self, make_function: Callable[..., Any], code: Any, namespace: dict[str, Any], *rest: Any
    ) -> Any:
        self.namespaces.append(namespace)
        return make_function(code, namespace, *rest)


def loads(pickled: bytes) -> Any:
    """Return what `ray.cloudpickle` has pickled; connect first if references to Ray's objects are in it.

    What it brings of the driver's script becomes part of ``__main__``; `rank/script.py` says why.
    """
    unpickler = _Unpickler(pickled)
    loaded = unpickler.load()
    _namespaces.extend(unpickler.namespaces)
    for namespace in unpickler.namespaces:
        if namespace.get("__name__") == "__main__":
            new = {name: value for name, value in namespace.items() if not name.startswith("__")}
            vars(sys.modules["__main__"]).update(new)
    return loaded


def end_script() -> None:
    """Drop what the script's functions have left in its globals, as Python does when it exits."""
    for namespace in _namespaces:
        if namespace.get("__name__") == "__main__":
            for name in namespace.keys() & vars(sys.modules["__main__"]).keys():
                if not name.startswith("__"):
                    del vars(sys.modules["__main__"])[name]
        namespace.clear()


def _warn_of_long_waits(descriptor: Any, resources: Any, strategy: Any) -> None:
    """Warn once of a task or actor that has to wait for CPUs. Ray calls this before each submission."""
    global _has_warned
    needed = {name: amount for name, amount in resources.items() if amount}
    if _has_warned or not needed or "TUNE_DISABLE_RESOURCE_CHECKS" in os.environ:
        return
    free = ray.available_resources()
    if all(free.get(name, 0.0) >= amount for name, amount in needed.items()):
        return
    _has_warned = True
    kind = "actor" if descriptor.class_name else "task"
    name = (descriptor.class_name or descriptor.function_name).rpartition(".")[2]
    logger.warning(
        "the %s %s needs %s, which is not free now: if trials hold all of it, the %s waits until one ends. "
        "Keep CPUs free with tune.TuneConfig(max_concurrent_trials=...), or set num_cpus=0: "
        "%s.options(num_cpus=0).remote(...)",
        *(kind, name, needed, kind, name),
    )
