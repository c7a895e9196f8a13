"""The Horovod that install-horovod built, in real worlds of processes: its patches do what they describe."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from horovod_worlds import TIMEOUT_S, run_worlds

from horovod_tune.horovod_build.installed import installed_horovod
from horovod_tune.horovod_build.patches import PATCH_LEVEL

pytestmark = pytest.mark.processes

PRELUDE = """
import json, os, time, torch
import horovod.torch as hvd

def wait_for(file):
    ends_s = time.monotonic() + 60
    while not os.path.exists(file) and time.monotonic() < ends_s:
        time.sleep(0.01)
"""

WORK = """
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


def test_the_installed_horovod_is_ours() -> None:
    horovod = installed_horovod()
    assert horovod is not None and horovod.patch_level == PATCH_LEVEL, "run: horovod-tune install-horovod"


CONNECTED = {
    # One host: the local group is the world, and every rank's cross group is itself.
    "a:3": {"global", "cross_0", "cross_1", "cross_2"},
    # One rank per host: the cross group is the world.
    "a:1,b:1,c:1": {"global", "local_a", "local_b", "local_c"},
    # Neither is; the second host is smaller.
    "a:2,b:1": {"global", "local_a", "local_b", "cross_0", "cross_1"},
}


@pytest.mark.slow
def test_every_group_is_connected_once_and_collectives_process_sets_and_training_work() -> None:
    for world, connected in zip(
        run_worlds(*CONNECTED, program=PRELUDE + WORK), CONNECTED.values(), strict=True
    ):
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
hvd.init()
print(json.dumps({"sum": hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item()}))
hvd.shutdown()
"""
    (world,) = run_worlds("a:2", program=PRELUDE + sums, before=elsewhere)
    assert world.said == [{"sum": 3.0}] * 2


def test_an_init_that_fails_raises_and_can_be_tried_again() -> None:
    program = """
os.environ.update(HOROVOD_SIZE="2", HOROVOD_LOCAL_SIZE="2", HOROVOD_GLOO_TIMEOUT_SECONDS="1")
try:
    hvd.init()
except ValueError as error:
    raised = str(error)
hvd.shutdown()
os.environ.update(HOROVOD_SIZE="1", HOROVOD_LOCAL_SIZE="1")
del os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"]
hvd.init()
print(json.dumps({"raised": raised, "size": hvd.size()}))
"""
    (world,) = run_worlds("a:1", program=PRELUDE + program)
    (said,) = world.said
    assert said["raised"].startswith("Horovod initialization failed") and said["size"] == 1
    assert "could not connect its ranks" in world.errors and "timeout" in world.errors.lower()


@pytest.mark.slow
def test_a_rank_that_does_not_come_does_not_hold_the_others_forever(tmp_path: Path) -> None:
    program = f"""
from horovod.common.exceptions import HorovodInternalError
freed = {str(tmp_path / "freed")!r}
hvd.init()
if hvd.rank() == 1:  # does not come before the other was freed
    wait_for(freed)
try:
    hvd.allreduce(torch.ones(1), name="gradient")
    said = "went through"
except HorovodInternalError as error:
    said = "freed"
open(freed, "w").close()
print(json.dumps({{"said": said}}))
"""
    stall = ("env", "HOROVOD_STALL_CHECK_TIME_SECONDS=1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS=2")
    (world,) = run_worlds("a:2", program=PRELUDE + program, before=stall)
    assert world.said == [{"said": "freed"}] * 2


@pytest.mark.slow
def test_ranks_without_work_ask_each_other_less_and_less_often(tmp_path: Path) -> None:
    program = f"""
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
    (world,) = run_worlds("a:2", program=PRELUDE + program, before=("env", "HOROVOD_TIMELINE=DYNAMIC"))
    # By the rule 100 in the first 0.1 s, 230 up to 1 s and 200 more; one each millisecond would be 3000.
    assert 1 <= world.said[0]["cycles"] <= 700


@pytest.mark.slow
def test_a_rank_that_waits_for_another_leaves_the_cpu_idle(tmp_path: Path) -> None:
    program = f"""
hvd.init()
waits = {str(tmp_path / "waits")!r}
if hvd.rank() == 1:
    wait_for(waits)
    time.sleep(3)
handle = hvd.allreduce_async(torch.ones(1), name="gradient", op=hvd.Sum)
if hvd.rank() == 0:
    open(waits, "w").close()
before = time.thread_time()
total = hvd.synchronize(handle).item()
print(json.dumps({{"total": total, "cpu_s": time.thread_time() - before}}))
"""
    (world,) = run_worlds("a:2", program=PRELUDE + program)
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
    """Connect to a listener in every way that no rank does; add connections that stay open to `kept`."""
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


def crowd(port: int, kept: list[socket.socket]) -> int:
    """Open more connections that send nothing than a listener waits for."""
    kept.extend(socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(300))
    return 300


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "call", "wanted", "rounds"),
    # All ranks but one have a listener for the one that is to come.
    [(3, call_on, 2 * (len(STRANGERS) + 2), 3), (2, crowd, 300, 1)],
)
def test_unauthenticated_connections_do_not_disturb_the_ranks(
    tmp_path: Path, size: int, call: Callable[[int, list[socket.socket]], int], wanted: int, rounds: int
) -> None:
    program = f"""
sums = []
for each in range({rounds}):
    if os.environ["HOROVOD_RANK"] == "{size - 1}":  # until it comes, the others listen
        wait_for(f"{tmp_path}/{{each}}")
    hvd.init()
    sums.append(hvd.allreduce(torch.ones(1), op=hvd.Sum).item())
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
            while calls[-1] < wanted and time.monotonic() < ends_s:
                calls[-1] += sum(call(port, kept) for port in ports_of_children())
                time.sleep(0.05)
            (tmp_path / str(each)).touch()

    strangers = threading.Thread(target=disturb)
    strangers.start()
    try:
        (world,) = run_worlds(f"a:{size}", program=PRELUDE + program)
    finally:
        strangers.join()
        for each in kept:
            each.close()
    assert min(calls) >= wanted
    assert world.said == [{"sums": [size] * rounds}] * size
