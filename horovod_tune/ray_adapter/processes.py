"""The processes in which Ray starts a trial's actors, and their session's directory."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIGHTNING_VARIABLE = {"PL_DISABLE_FORK": "1"}
"""What Tune sets in the processes of every trial."""


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


def environment_of_workers() -> tuple[dict[str, str], int] | None:
    """Return the environment in which Ray starts this job's processes on this host, and its daemon's pid.

    None in a process that Ray has not started: a driver.
    """
    import ray

    with open("/proc/self/environ", "rb") as file:  # os.environ has what was set since
        variables = (each.partition(b"=") for each in file.read().split(b"\0") if each)
        environment = {os.fsdecode(name): os.fsdecode(value) for name, _, value in variables}
    if "RAY_RAYLET_PID" not in environment or "RAY_JOB_ID" not in environment:
        return None
    # A process that was kept ready for any job has none in its environment.
    environment["RAY_JOB_ID"] = ray.get_runtime_context().get_job_id()
    return environment, int(environment["RAY_RAYLET_PID"])


def private_directory() -> Path | None:
    """Return a directory of this Ray session on this host that only this user may enter.

    None in a process without such a session (a client of a cluster elsewhere), or where there cannot be one:
    the session's is not to be written to, or somebody else has made one of that name.
    """
    import ray

    node = getattr(ray._private.worker, "_global_node", None)
    session = Path(node.get_session_dir_path()) if node is not None else None
    if session is None or not session.is_dir():
        return None
    path = session / f"horovod_tune_{os.geteuid()}"
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError:
        return None
    # Anybody may write to Ray's own directory.
    facts = path.lstat()
    is_ours = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077
    return path if is_ours else None
