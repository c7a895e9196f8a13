"""Ray sessions of a test's own: begun on nobody else's cluster, and ended whatever comes.

Not in conftest.py: several folders have one, and `import conftest` is the one that was loaded last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def local_ray(num_cpus: int, **settings: Any) -> Iterator[Any]:
    """A Ray of this machine with ``num_cpus``; ``settings`` are more of ``ray.init``'s."""
    import ray

    ray.shutdown()
    ray.init(
        "local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        **settings,
    )
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def simulated_nodes(*nodes: dict[str, Any]) -> Iterator[Any]:
    """A Ray of several nodes on this machine, one for each of ``nodes``, which say what it has.

    The driver's own node, the head, has no CPUs: trials land on the others alone.
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
