"""The Horovod that install-horovod built, in real worlds of processes: its patches do what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
from horovod.runner.common.util.hosts import SlotInfo, get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousHandler, RendezvousServer

from horovod_tune.horovod_build.installed import installed_horovod
from horovod_tune.horovod_build.patches import PATCH_LEVEL

TIMEOUT_S = 120

WORK = """
import json, torch
import horovod.torch as hvd

torch.set_num_threads(1)
hvd.init()
everyone = hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()
first_two = hvd.add_process_set([0, 1])
some = None
if first_two.included():
    some = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=first_two).item()
hvd.barrier()
hvd.shutdown()
hvd.init()
again = hvd.allgather(torch.tensor([hvd.rank()])).tolist()

torch.manual_seed(hvd.rank())
model = torch.nn.Linear(3, 1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
for _ in range(3):
    optimizer.zero_grad(set_to_none=True)
    model(torch.full((2, 3), float(hvd.rank()))).sum().backward()
    optimizer.step()
print(json.dumps({
    "everyone": everyone, "some": some, "again": again, "weights": model.weight.flatten().tolist(),
    "place": [hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()],
}))
hvd.shutdown()
"""


class Recording(RendezvousHandler):
    """Horovod's own rendezvous, which notes the groups that ranks connect for."""

    scopes: ClassVar[set[str]] = set()

    def do_PUT(self) -> None:
        self.scopes.add(self.path.split("/")[1])
        super().do_PUT()


@pytest.fixture
def rendezvous() -> Iterator[RendezvousServer]:
    Recording.scopes.clear()
    server = RendezvousServer()
    yield server
    server.stop()


def placement(slot: SlotInfo, port: int) -> dict[str, str]:
    """Return what a rank's environment says of its place, with the rendezvous on this host."""
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "hostname")
    return {f"HOROVOD_{name.upper()}": str(getattr(slot, name)) for name in names} | {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "HOROVOD_GLOO_IFACE": "lo",
        "OMP_NUM_THREADS": "1",
    }


def run_world(
    server: RendezvousServer, hosts: str, program: str = WORK, *, before: tuple[str, ...] = ()
) -> list[dict[str, object]]:
    """Run `program` in a process for each slot of `hosts` (``a:2,b:1``); return what each printed last."""
    size = sum(int(part.split(":")[1]) for part in hosts.split(","))
    slots = get_host_assignments(parse_hosts(hosts), size)
    port = server.start(Recording)
    server.init(slots)

    def run(slot: SlotInfo) -> dict[str, object]:
        ran = subprocess.run(
            [*before, sys.executable, "-c", program],
            env=os.environ | placement(slot, port),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        return dict(json.loads(ran.stdout.strip().splitlines()[-1]))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, slots))


def test_the_installed_horovod_is_ours() -> None:
    horovod = installed_horovod()
    assert horovod is not None and horovod.patch_level == PATCH_LEVEL, "run: horovod-tune install-horovod"


@pytest.mark.parametrize(
    ("hosts", "connected"),
    [
        # One host: the local group is the world, and every rank's cross group is itself.
        ("a:3", {"global", "cross_0", "cross_1", "cross_2"}),
        # One rank a host: the cross group is the world.
        ("a:1,b:1,c:1", {"global", "local_a", "local_b", "local_c"}),
        # Neither is; the second host is smaller.
        ("a:2,b:1", {"global", "local_a", "local_b", "cross_0", "cross_1"}),
    ],
)
def test_every_group_is_connected_once_and_works(
    rendezvous: RendezvousServer, hosts: str, connected: set[str]
) -> None:
    said = run_world(rendezvous, hosts)
    # The process set of ranks 0 and 1 is the test's own; the one of all ranks connects nothing.
    assert {scope for scope in Recording.scopes if "process_set" not in scope} == connected
    assert {scope.split("_hash_")[1] for scope in Recording.scopes if "_hash_" in scope} != set()
    assert len({scope.split("_hash_")[1] for scope in Recording.scopes if "_hash_" in scope}) == 1
    assert [one["everyone"] for one in said] == [6.0] * 3
    assert [one["some"] for one in said] == [2.0, 2.0, None]
    assert [one["again"] for one in said] == [[0, 1, 2]] * 3
    assert said[0]["weights"] == said[1]["weights"] == said[2]["weights"]
    slots = get_host_assignments(parse_hosts(hosts), 3)
    assert [one["place"] for one in said] == [
        [slot.local_rank, slot.local_size, slot.cross_rank, slot.cross_size] for slot in slots
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a process another host name")
def test_a_host_name_that_resolves_to_nothing_is_no_obstacle(rendezvous: RendezvousServer) -> None:
    elsewhere = ("unshare", "--uts", "sh", "-c", 'hostname no-such-host-name && exec "$0" "$@"')
    sums = """
import json, torch
import horovod.torch as hvd
hvd.init()
print(json.dumps({"sum": hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()}))
hvd.shutdown()
"""
    assert run_world(rendezvous, "a:2", sums, before=elsewhere) == [{"sum": 3.0}] * 2


def test_an_init_that_fails_raises_and_can_be_tried_again(rendezvous: RendezvousServer) -> None:
    port = rendezvous.start()
    rendezvous.init(get_host_assignments(parse_hosts("a:2"), 2))
    program = """
import os
import horovod.torch as hvd
try:
    hvd.init()
except ValueError as error:
    print("raised:", error)
hvd.shutdown()
os.environ.update(HOROVOD_SIZE="1", HOROVOD_LOCAL_SIZE="1")
del os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
hvd.init()
print("size:", hvd.size())
"""
    alone = placement(get_host_assignments(parse_hosts("a:2"), 2)[0], port)
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | alone | {"HOROVOD_GLOO_TIMEOUT_SECONDS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[0].startswith("raised: Horovod initialization failed")
    assert ran.stdout.splitlines()[1] == "size: 1"
    assert "could not connect its ranks" in ran.stderr and "timeout" in ran.stderr.lower()
