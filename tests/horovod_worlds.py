"""Real worlds of processes on this machine, of Horovod or torch.distributed: a program runs in each rank."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, ClassVar, NamedTuple

from horovod.runner.common.util.hosts import SlotInfo, get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousHandler, RendezvousServer

TIMEOUT_S = 200
NAMES = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "hostname")
# One process after the other world: an import of torch takes longer than all the rest.
RANK = """
import json, os
for placement in json.loads(os.environ["PLACEMENTS"]):
    os.environ.update(placement)
    exec(os.environ["PROGRAM"], {})
"""


class Recording(RendezvousHandler):
    """Horovod's own rendezvous, which notes the groups that ranks connect for, by its port."""

    scopes: ClassVar[dict[int, set[str]]] = defaultdict(set)

    def do_PUT(self) -> None:
        self.scopes[self.server.server_address[1]].add(self.path.split("/")[1])
        super().do_PUT()


class World(NamedTuple):
    """What came of one world: its ranks' places, the groups that they connected for, the JSON object that
    each of them printed, and what all have written to stderr, in all worlds.
    """

    slots: list[SlotInfo]
    scopes: set[str]
    said: list[dict[str, Any]]
    errors: str


def placement(slot: SlotInfo, port: int, store_port: int) -> dict[str, str]:
    """Return what a rank's environment says of its place, with the rendezvous and the store on this host."""
    return {f"HOROVOD_{name.upper()}": str(getattr(slot, name)) for name in NAMES} | {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "HOROVOD_GLOO_IFACE": "lo",
        "RANK": str(slot.rank),
        "WORLD_SIZE": str(slot.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store_port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def run_worlds(*layouts: str, program: str, before: tuple[str, ...] = (), **settings: str) -> list[World]:
    """Run `program` in the world of each layout (``a:2,b:1``), one after the other in the same processes.

    `before` is put before the command of each rank; `settings` are more variables of its environment.
    """
    all_slots = [get_host_assignments(parse_hosts(hosts), size_of(hosts)) for hosts in layouts]
    with ExitStack() as undo:
        ports, store_ports = [], []
        for slots in all_slots:
            server = RendezvousServer()
            ports.append(server.start(Recording))
            undo.callback(server.stop)
            server.init(slots)
            with socket.create_server(("127.0.0.1", 0)) as free:
                store_ports.append(free.getsockname()[1])

        def run(rank: int) -> tuple[list[dict[str, Any]], str]:
            places = zip(all_slots, ports, store_ports, strict=True)
            placements = [placement(slots[rank], port, store) for slots, port, store in places]
            own = {"PLACEMENTS": json.dumps(placements), "PROGRAM": program, "OMP_NUM_THREADS": "1"}
            ran = subprocess.run(
                [*before, sys.executable, "-c", RANK],
                env={**os.environ, **own, **settings},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
            assert ran.returncode == 0, ran.stderr[-2000:]
            return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")], ran.stderr

        size = len(all_slots[0])
        with ThreadPoolExecutor(size) as pool:
            ranks = list(pool.map(run, range(size)))
    errors = "".join(each for _, each in ranks)
    return [
        World(slots, Recording.scopes[port], [said[number] for said, _ in ranks], errors)
        for number, (slots, port) in enumerate(zip(all_slots, ports, strict=True))
    ]


def size_of(hosts: str) -> int:
    return sum(int(part.split(":")[1]) for part in hosts.split(","))
