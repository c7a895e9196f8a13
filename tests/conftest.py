"""What the tests of real trials share: a Ray session of their own, and a look at its processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

# A test says what it wants to see; Tune's tables and Ray's usage report are not it.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
os.environ.setdefault("TUNE_MAX_PENDING_TRIALS_PG", "2")


@pytest.fixture(scope="module")
def ray_session() -> Iterator[Any]:
    """A local Ray of 4 CPUs for the module, ended after it."""
    import ray

    ray.shutdown()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


@pytest.fixture
def tune_run(ray_session: Any, tmp_path: Any) -> Callable[..., Any]:
    """`tune.run` that writes below the test's own folder and prints nothing."""
    from ray import tune

    def run(trainable: Any, **arguments: Any) -> Any:
        settings = {"storage_path": str(tmp_path), "verbose": 0, "name": "experiment", **arguments}
        return tune.run(trainable, **settings)

    return run


def training_processes() -> list[psutil.Process]:
    """Return the live training actors of this process's own Ray session."""
    import ray

    session = ray._private.worker._global_node.address_info["session_dir"]
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        command = " ".join(process.info["cmdline"] or [])
        if "TrainingActor" not in command:
            continue
        try:
            files = [each.path for each in process.open_files()]
        except psutil.Error:
            continue
        if any(path.startswith(session) for path in files):
            found.append(process)
    return found


def eventually(holds: Callable[[], Any], *, within_s: float = 20.0, why: Any = "") -> Any:
    """Return what ``holds()`` returns as soon as it is true; fail after ``within_s``."""
    end = time.monotonic() + within_s
    while True:
        value = holds()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {within_s:g} s: {why() if callable(why) else why or holds}")
        time.sleep(0.1)
