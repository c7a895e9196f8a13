"""Ray sessions for tests: one that all modules of a process share, and ones of a test's own.

Not in conftest.py: several folders have one, and `import conftest` is the one that was loaded last.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SHARED_CPUS = 4
FREE_S = 20.0  # how long trials of the module before may take to end
# Enough for each test. Ray's own choice is 30 % of the memory, and several sessions run side by side.
OBJECT_STORE_BYTES = 512 << 20

_shared_session = ""


def shared_ray() -> Any:
    """Return Ray, connected to this process's session of 4 CPUs; starts it unless it still runs.

    A test that needs another Ray (`local_ray`, `simulated_nodes`) ends it, and the next call starts another.
    So does one that has lost a CPU: Ray 2.60 never frees that of a placement group which is removed
    within 2 ms of its registration, before its resources are committed.
    """
    global _shared_session
    import ray

    runs = _shared_session and ray.is_initialized() and session_dir() == _shared_session
    if not (runs and _is_free(SHARED_CPUS)):
        ray.shutdown()
        _start(SHARED_CPUS)
        _shared_session = session_dir()
    return ray


def end_shared_ray() -> None:
    """End this process's session, if there is one."""
    global _shared_session
    if _shared_session:
        import ray

        ray.shutdown()
        _shared_session = ""


def _is_free(cpus: int) -> bool:
    import ray

    end = time.monotonic() + FREE_S
    while ray.available_resources().get("CPU", 0.0) < cpus:
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


def session_dir() -> str:
    import ray

    node: Any = ray._private.worker._global_node
    return str(node.address_info["session_dir"])


def _start(num_cpus: int, **settings: Any) -> None:
    import ray

    for is_last in (False, True):
        try:
            ray.init(
                "local",
                num_cpus=num_cpus,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                **settings,
            )
            return
        except (
            Exception
        ):  # "timed out during startup": it has 30 s, too few when several start on a busy machine
            ray.shutdown()
            if is_last:
                raise


@contextmanager
def local_ray(num_cpus: int, **settings: Any) -> Iterator[Any]:
    """A Ray with ``num_cpus`` for one test or module; ``settings`` are more of ``ray.init``'s."""
    import ray

    ray.shutdown()
    _start(num_cpus, **settings)
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def simulated_nodes(*nodes: dict[str, Any]) -> Iterator[Any]:
    """A Ray of several nodes on this machine, one for each of ``nodes``, which say what it has.

    The driver's own node, the head, has no CPUs: trials land only on the others.
    """
    import ray
    from ray.cluster_utils import Cluster

    ray.shutdown()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for node in nodes:
            cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        cluster.wait_for_nodes(timeout=60)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def drain_node(address: str, node_id: str) -> None:
    """Have the Ray at ``address`` drain a node as preempted; it is given ten minutes."""
    ray = str(Path(sys.executable).with_name("ray"))
    drain = [ray, "drain-node", "--address", address, "--node-id", node_id]
    why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
    subprocess.run([*drain, *why, "--deadline-remaining-seconds", "600"], check=True, timeout=120)
