"""A real world of processes on this machine, of Horovod or torch.distributed, in which a program runs."""

from __future__ import annotations

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousServer
from processes import run_python

TIMEOUT_S = 200
NAMES = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "hostname")


def run_world(program: Path, size: int = 2, backend: str = "horovod") -> list[dict[str, Any]]:
    """Run `program` as `size` ranks; return the JSON that each printed in its last line."""
    slots = get_host_assignments(parse_hosts(f"localhost:{size}"), size)
    server = RendezvousServer()
    port = server.start()
    server.init(slots)
    with socket.create_server(("127.0.0.1", 0)) as free:
        store_port = free.getsockname()[1]

    def run(slot: Any) -> dict[str, Any]:
        place = {f"HOROVOD_{name.upper()}": str(getattr(slot, name)) for name in NAMES}
        ran = run_python(
            str(program),
            env=os.environ
            | place
            | {
                "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
                "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
                "HOROVOD_CONTROLLER": "gloo",
                "HOROVOD_CPU_OPERATIONS": "gloo",
                "HOROVOD_GLOO_IFACE": "lo",
                "OMP_NUM_THREADS": "1",
                "BACKEND": backend,
                "RANK": str(slot.rank),
                "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store_port),
                "GLOO_SOCKET_IFNAME": "lo",
            },
            timeout_s=TIMEOUT_S,
        )
        return dict(json.loads(ran.stdout.splitlines()[-1]))

    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(run, slots))
    finally:
        server.stop()
