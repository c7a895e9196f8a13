"""The worlds of one process after the other, in plain processes: which rank may leave, and when."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from typing import Any

import pytest
from processes import run_python

from horovod_tune.messages import RankInfo

pytestmark = pytest.mark.processes

SIZE = 3
WAIT_S = 60.0


def be_rank(rank: int, pipe: Any) -> None:
    """Enter and leave worlds as told: their store, a pause before, whether all but rank 1 reduce."""
    import torch
    import torch.distributed as dist

    from horovod_tune.backends.torch_distributed.torch_world import TorchWorld

    world = TorchWorld(stall_timeout_s=WAIT_S, connect_timeout_s=WAIT_S, device="cpu")
    world.load()
    while True:
        pipe.recv()  # no rank reads the last world's store any more
        pipe.send(world.serve_store("127.0.0.1") if rank == 0 else None)
        port, pause_s, has_collective = pipe.recv()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        found: Any = None
        time.sleep(pause_s)
        try:
            world.enter(RankInfo(rank, SIZE, rank, SIZE, 0, 1), "unused")
            if has_collective and rank != 1:
                dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            kind, _, awaited = world.describe_failure(error, None)
            found = (kind.name, awaited, str(error)[:200])
        world.end(has_returned=found is None)
        world.leave()
        pipe.send(found)


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

        chance = random.Random(0)
        for number in range(30):
            has_collective = number % 3 == 2
            for pipe in pipes:
                pipe.send("the next world")
            port = answers()[0]
            for pipe in pipes:
                pipe.send((port, chance.choice([0.0, 0.0, 0.05]), has_collective))
            found = answers()
            if has_collective:
                assert found[1] is None
                assert [each[:2] for each in (found[0], found[2])] == [("STALLED", {1: "a collective"})] * 2
            else:
                assert found == [None] * SIZE
    finally:
        for each in ranks:
            each.kill()
            each.join()


ALONE = """
import os
from datetime import timedelta
from horovod_tune.messages import RankInfo
from horovod_tune.backends.torch_distributed import process_groups, torch_world

process_groups.ARRIVAL_TIMEOUT = timedelta(seconds=1)
world = torch_world.TorchWorld(stall_timeout_s=1, connect_timeout_s=5, device="cpu")
world.load()
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(world.serve_store("127.0.0.1")))
try:
    world.enter(RankInfo(0, 3, 0, 3, 0, 1), "a")
except torch_world.WorldBroken as error:
    print(error)
"""


def test_ranks_that_do_not_arrive_are_named() -> None:
    assert "could not be made, rank(s) 1, 2 did not arrive: wait timeout" in run_python("-c", ALONE).stdout
