"""The Horovod that install-horovod built, in real worlds of processes: its patches do what they say."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from horovod.runner.common.util.hosts import SlotInfo, get_host_assignments, parse_hosts
from horovod.runner.http.http_server import RendezvousHandler, RendezvousServer

from horovod_tune.horovod_build.installed import installed_horovod
from horovod_tune.horovod_build.patches import PATCH_LEVEL

pytestmark = pytest.mark.processes

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
}), flush=True)
hvd.shutdown()
"""


class Recording(RendezvousHandler):
    """Horovod's own rendezvous, which notes the groups that ranks connect for, by its port."""

    scopes: ClassVar[dict[int, set[str]]] = defaultdict(set)

    def do_PUT(self) -> None:
        self.scopes[self.server.server_address[1]].add(self.path.split("/")[1])
        super().do_PUT()


@dataclass(frozen=True)
class World:
    """What came of one world: the groups that its ranks connected for, and what each rank printed last."""

    slots: list[SlotInfo]
    scopes: set[str]
    said: list[dict[str, Any]]


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


# One process after the other world: an import of torch takes longer than all the rest.
RANK = """
import json, os
for placement in json.loads(os.environ["PLACEMENTS"]):
    os.environ.update(placement)
    exec(os.environ["PROGRAM"], {})
"""


def run_worlds(*layouts: str, program: str, before: tuple[str, ...] = ()) -> list[World]:
    """Run `program` in the world of each layout (``a:2,b:1``), one after the other in the same processes."""
    all_slots = [get_host_assignments(parse_hosts(hosts), size_of(hosts)) for hosts in layouts]
    with ExitStack() as undo:
        ports = []
        for slots in all_slots:
            server = RendezvousServer()
            ports.append(server.start(Recording))
            undo.callback(server.stop)
            server.init(slots)

        def run(rank: int) -> list[dict[str, Any]]:
            placements = [placement(slots[rank], port) for slots, port in zip(all_slots, ports, strict=True)]
            ran = subprocess.run(
                [*before, sys.executable, "-c", RANK],
                env=os.environ | {"PLACEMENTS": json.dumps(placements), "PROGRAM": program},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
            assert ran.returncode == 0, ran.stderr[-2000:]
            return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]

        size = len(all_slots[0])
        with ThreadPoolExecutor(size) as pool:
            said = list(pool.map(run, range(size)))
    return [
        World(slots, Recording.scopes[port], [rank[number] for rank in said])
        for number, (slots, port) in enumerate(zip(all_slots, ports, strict=True))
    ]


def size_of(hosts: str) -> int:
    return sum(int(part.split(":")[1]) for part in hosts.split(","))


def test_the_installed_horovod_is_ours() -> None:
    horovod = installed_horovod()
    assert horovod is not None and horovod.patch_level == PATCH_LEVEL, "run: horovod-tune install-horovod"


CONNECTED = {
    # One host: the local group is the world, and every rank's cross group is itself.
    "a:3": {"global", "cross_0", "cross_1", "cross_2"},
    # One rank a host: the cross group is the world.
    "a:1,b:1,c:1": {"global", "local_a", "local_b", "local_c"},
    # Neither is; the second host is smaller.
    "a:2,b:1": {"global", "local_a", "local_b", "cross_0", "cross_1"},
}


@pytest.mark.slow
def test_every_group_is_connected_once_and_collectives_process_sets_and_training_work() -> None:
    for world, connected in zip(run_worlds(*CONNECTED, program=WORK), CONNECTED.values(), strict=True):
        # The process set of ranks 0 and 1 is the test's own; the one of all ranks connects nothing.
        assert {scope for scope in world.scopes if "process_set" not in scope} == connected
        assert len({scope.split("_hash_")[1] for scope in world.scopes if "_hash_" in scope}) == 1
        said = world.said
        assert [one["everyone"] for one in said] == [6.0] * 3
        assert [one["some"] for one in said] == [2.0, 2.0, None]
        assert [one["again"] for one in said] == [[0, 1, 2]] * 3
        assert said[0]["weights"] == said[1]["weights"] == said[2]["weights"]
        assert [one["place"] for one in said] == [
            [slot.local_rank, slot.local_size, slot.cross_rank, slot.cross_size] for slot in world.slots
        ]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a process another host name")
def test_a_host_name_that_resolves_to_nothing_is_no_obstacle() -> None:
    elsewhere = ("unshare", "--uts", "sh", "-c", 'hostname no-such-host-name && exec "$0" "$@"')
    sums = """
import json, torch
import horovod.torch as hvd
hvd.init()
print(json.dumps({"sum": hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()}))
hvd.shutdown()
"""
    (world,) = run_worlds("a:2", program=sums, before=elsewhere)
    assert world.said == [{"sum": 3.0}] * 2


def test_an_init_that_fails_raises_and_can_be_tried_again() -> None:
    slots = get_host_assignments(parse_hosts("a:2"), 2)
    server = RendezvousServer()
    port = server.start()
    server.init(slots)
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
    alone = placement(slots[0], port)
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | alone | {"HOROVOD_GLOO_TIMEOUT_SECONDS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    server.stop()
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[0].startswith("raised: Horovod initialization failed")
    assert ran.stdout.splitlines()[1] == "size: 1"
    assert "could not connect its ranks" in ran.stderr and "timeout" in ran.stderr.lower()


@pytest.mark.slow
def test_a_rank_that_does_not_come_does_not_hold_the_others_for_ever(tmp_path: Path) -> None:
    program = f"""
import json, os, time, torch
import horovod.torch as hvd
from horovod.common.exceptions import HorovodInternalError
freed = {str(tmp_path / "freed")!r}
hvd.init()
if hvd.rank() == 1:  # does not come before the other was freed
    ends_s = time.monotonic() + 60
    while not os.path.exists(freed) and time.monotonic() < ends_s:
        time.sleep(0.1)
try:
    hvd.allreduce(torch.ones(1), name="gradient")
    said = "went through"
except HorovodInternalError as error:
    said = "freed"
open(freed, "w").close()
print(json.dumps({{"said": said}}))
"""
    stall = ("env", "HOROVOD_STALL_CHECK_TIME_SECONDS=1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=2")
    (world,) = run_worlds("a:2", program=program, before=stall)
    assert world.said == [{"said": "freed"}] * 2


@pytest.mark.slow
def test_ranks_without_work_ask_each_other_less_and_less_often(tmp_path: Path) -> None:
    program = f"""
import json, time, torch
import horovod.torch as hvd
hvd.init()
hvd.allreduce(torch.ones(1), name="before")
timeline = {str(tmp_path / "timeline")!r}
hvd.start_timeline(timeline, mark_cycles=True)
time.sleep(3)
hvd.allreduce(torch.ones(1), name="after")
hvd.stop_timeline()
if hvd.rank() == 0:
    with open(timeline) as events:
        print(json.dumps({{"cycles": events.read().count("CYCLE_START")}}))
else:
    print(json.dumps({{}}))
"""
    (world,) = run_worlds("a:2", program=program, before=("env", "HOROVOD_TIMELINE=DYNAMIC"))
    # By the rule 100 in the first 0.1 s, 230 up to 1 s and 200 more; one each millisecond would be 3000.
    assert 1 <= world.said[0]["cycles"] <= 700


@pytest.mark.slow
def test_a_rank_that_waits_for_another_leaves_the_cpu_alone(tmp_path: Path) -> None:
    program = f"""
import json, os, time, torch
import horovod.torch as hvd
hvd.init()
waits = {str(tmp_path / "waits")!r}
if hvd.rank() == 1:
    ends_s = time.monotonic() + 60
    while not os.path.exists(waits) and time.monotonic() < ends_s:
        time.sleep(0.05)
    time.sleep(3)
handle = hvd.allreduce_async(torch.ones(1), name="gradient", op=hvd.Sum)
if hvd.rank() == 0:
    open(waits, "w").close()
before = time.thread_time()
total = hvd.synchronize(handle).item()
print(json.dumps({{"total": total, "cpu_s": time.thread_time() - before}}))
"""
    (world,) = run_worlds("a:2", program=program)
    assert [each["total"] for each in world.said] == [2, 2]
    assert world.said[0]["cpu_s"] < 0.5, "it asks without a pause"


STRANGERS = {
    "an HTTP client": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a silent one": b"",
    "one that sends as much as a token has": bytes(range(16)),
    "one that sends more": os.urandom(1000),
    "one that begins and goes silent": b"\x00\x01\x02",
}


def ports_of_children() -> list[int]:
    """Return the ports that this process's children listen on."""
    ports = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has ended
            connections = getattr(child, "net_connections", child.connections)("tcp")
            ports += [each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN]
    return ports


def call_on(port: int, kept: list[socket.socket]) -> int:
    """Be every kind of stranger to a listener; those that do not go by themselves are added to `kept`."""
    calls = 0
    for said in [*STRANGERS.values(), None, None]:
        with contextlib.suppress(ConnectionError):
            stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
            calls += 1
            if said is not None:
                kept.append(stranger)
                stranger.sendall(said)
                continue
            if calls % 2:  # one goes politely, the other resets the connection
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            stranger.close()
    return calls


@pytest.mark.slow
def test_strangers_who_connect_to_the_ranks_do_not_disturb_them(tmp_path: Path) -> None:
    rounds = 3
    program = f"""
import json, os, time, torch
import horovod.torch as hvd
sums = []
for each in range({rounds}):
    if os.environ["HOROVOD_RANK"] == "2":  # until it comes, the others listen
        ends_s = time.monotonic() + 60
        while not os.path.exists(f"{tmp_path}/{{each}}") and time.monotonic() < ends_s:
            time.sleep(0.01)
    hvd.init()
    sums.append(hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item())
    hvd.barrier()
    hvd.shutdown()
print(json.dumps({{"sums": sums}}))
"""
    kept: list[socket.socket] = []
    calls: list[int] = []

    def disturb() -> None:
        for each in range(rounds):
            ends_s = time.monotonic() + TIMEOUT_S
            calls.append(0)
            # Two ranks, each with a listener for the one that is to come.
            while calls[-1] < 2 * (len(STRANGERS) + 2) and time.monotonic() < ends_s:
                calls[-1] += sum(call_on(port, kept) for port in ports_of_children())
                time.sleep(0.05)
            (tmp_path / str(each)).touch()

    strangers = threading.Thread(target=disturb)
    strangers.start()
    try:
        (world,) = run_worlds("a:3", program=program)
    finally:
        strangers.join()
        for each in kept:
            each.close()
    assert min(calls) >= 2 * (len(STRANGERS) + 2)
    assert world.said == [{"sums": [6.0] * rounds}] * 3


@pytest.mark.slow
def test_more_silent_strangers_than_are_waited_for_do_not_disturb_ranks(tmp_path: Path) -> None:
    program = f"""
import json, os, time, torch
import horovod.torch as hvd
if os.environ["HOROVOD_RANK"] == "1":
    ends_s = time.monotonic() + 60
    while not os.path.exists("{tmp_path}/go") and time.monotonic() < ends_s:
        time.sleep(0.01)
hvd.init()
print(json.dumps({{"sum": hvd.allreduce(torch.ones(1), op=hvd.Sum).item()}}))
"""
    kept: list[socket.socket] = []

    def disturb() -> None:
        ends_s = time.monotonic() + TIMEOUT_S
        while not (ports := ports_of_children()) and time.monotonic() < ends_s:
            time.sleep(0.05)
        for _ in range(300):
            kept.extend(socket.create_connection(("127.0.0.1", port), timeout=5) for port in ports)
        (tmp_path / "go").touch()

    strangers = threading.Thread(target=disturb)
    strangers.start()
    try:
        (world,) = run_worlds("a:2", program=program)
    finally:
        strangers.join()
        for each in kept:
            each.close()
    assert len(kept) >= 300
    assert world.said == [{"sum": 2.0}] * 2
