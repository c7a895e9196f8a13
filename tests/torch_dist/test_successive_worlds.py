"""Process groups of one process after the other, in plain processes: who may leave, and when."""

from __future__ import annotations

import multiprocessing
import os
import random
import socket
import time
from datetime import timedelta
from typing import Any

import pytest
from processes import run_python

from horovod_tune.messages import RankInfo
from horovod_tune.torch_dist.world_store import WorldStore

pytestmark = pytest.mark.processes

SIZE = 3
WAIT_S = 60.0


def be_rank(rank: int, pipe: Any) -> None:
    """Enter and leave worlds as told: their name, a pause before, whether all but rank 1 reduce."""
    import torch
    import torch.distributed as dist

    from horovod_tune.torch_dist.torch_world import TorchWorld

    world = TorchWorld(stall_timeout_s=WAIT_S, connect_timeout_s=WAIT_S, use_gpu=False)
    world.load()
    pipe.send(world.serve_store("127.0.0.1") if rank == 0 else None)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(pipe.recv()), GLOO_SOCKET_IFNAME="lo")
    while (job := pipe.recv()) is not None:
        name, pause_s, has_collective = job
        found: Any = None
        time.sleep(pause_s)
        try:
            world.enter(RankInfo(rank, SIZE, rank, SIZE, 0, 1), name)
            if has_collective and rank != 1:
                dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            kind, _, awaited = world.describe_failure(error, None)
            found = (kind.name, awaited, str(error)[:200])
        world.end(has_returned=found is None)
        pipe.send(found)
        pipe.recv()  # every rank has ended
        pipe.send(world.keep(WAIT_S) + world.release(WAIT_S))


@pytest.mark.slow
def test_ranks_that_return_at_once_disturb_no_other_and_are_known_to_those_that_wait() -> None:
    context = multiprocessing.get_context("spawn")
    pipes, ranks = [], []
    try:
        for rank in range(SIZE):
            pipe, other = context.Pipe()
            ranks.append(context.Process(target=be_rank, args=(rank, other), daemon=True))
            ranks[-1].start()
            pipes.append(pipe)

        def answers() -> list[Any]:
            assert all(pipe.poll(WAIT_S) for pipe in pipes)
            return [pipe.recv() for pipe in pipes]

        port = answers()[0]
        for pipe in pipes:
            pipe.send(port)
        chance = random.Random(0)
        for number in range(30):
            has_collective = number % 3 == 2
            for pipe in pipes:
                pipe.send((f"{number}.0", chance.choice([0.0, 0.0, 0.05]), has_collective))
            found = answers()
            if has_collective:
                assert found[1] is None
                assert [each[:2] for each in (found[0], found[2])] == [("STALLED", {1: "a collective"})] * 2
            else:
                assert found == [None] * SIZE
            for pipe in pipes:
                pipe.send("all have ended")
            assert answers() == [[]] * SIZE
    finally:
        for each in ranks:
            each.kill()
            each.join()


def test_a_world_begins_without_the_keys_of_the_trial_before(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        settings = {"wait_for_workers": False, "master_listen_fd": listener.detach()}
        server = dist.TCPStore("127.0.0.1", port, is_master=True, **settings)
    if not hasattr(server, "list_keys"):
        pytest.skip("this release of torch lacks list_keys")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    late = WorldStore(dist, RankInfo(1, 2, 1, 2, 0, 1), "2.0")
    late.connect(timedelta(seconds=WAIT_S))
    late.publish("arrived")
    server.set("the function's own", "")
    WorldStore(dist, RankInfo(0, 2, 0, 2, 0, 1), "2.0").connect(timedelta(seconds=WAIT_S))
    assert server.list_keys() == ["2.0.arrived.1"]


ALONE = """
import os
from datetime import timedelta
from horovod_tune.messages import RankInfo
from horovod_tune.torch_dist import process_groups, torch_world

process_groups.ARRIVAL_TIMEOUT = timedelta(seconds=1)
world = torch_world.TorchWorld(stall_timeout_s=1, connect_timeout_s=5, use_gpu=False)
world.load()
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(world.serve_store("127.0.0.1")))
try:
    world.enter(RankInfo(0, 3, 0, 3, 0, 1), "a")
except torch_world.WorldBroken as error:
    print(error)
"""


def test_ranks_that_do_not_arrive_are_named() -> None:
    assert "could not be made, rank(s) 1, 2 did not arrive: wait timeout" in run_python("-c", ALONE).stdout
