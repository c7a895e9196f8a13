"""Ranks whose packets to the rendezvous are lost get an error from hvd.init() in time; none waits on."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from horovod_tune.actors import ranks
from horovod_tune.backends.horovod.horovod_backend import horovod_environment
from horovod_tune.backends.horovod.rendezvous import Rendezvous

pytestmark = [pytest.mark.slow, pytest.mark.processes]

pytest.importorskip("horovod")

GLOO_TIMEOUT_S = 5
# Without an end to each wait a rank took five times the timeout (for a peer), or never came back.
LIMIT_S = 4 * GLOO_TIMEOUT_S
TIMEOUT_S = 150

RANK = """
import json, time
import horovod.torch as hvd
began = time.monotonic()
try:
    hvd.init()
    said = "connected"
except ValueError as error:
    said = str(error)
print(json.dumps({"said": said, "seconds": time.monotonic() - began}))
"""


class Lossy(Rendezvous):
    """A rendezvous that never answers the requests for which `loses` is true, and counts all of them."""

    def __init__(self, *, loses: tuple[str, str] | None = None) -> None:
        self.requests: collections.Counter[str] = collections.Counter()
        self._loses = loses
        super().__init__("127.0.0.1")

    async def answer(self, method: str, path: str, body: bytes) -> bytes | None:
        self.requests[path.rpartition("/")[0]] += 1
        if (method, path) == self._loses:
            await asyncio.sleep(TIMEOUT_S)
        return await super().answer(method, path, body)


@contextlib.contextmanager
def place_that_drops_connections() -> Iterator[str]:
    """A port whose queue of connections is full: Linux drops whatever else comes, as a firewall does."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}/secret"


def run_ranks(address: str, size: int) -> list[dict[str, object]]:
    """Run the ranks of one host; return what each has printed. None outlives this call."""
    processes = []
    for world in ranks.assign_ranks(["here"] * size, first_node="here"):
        environment = horovod_environment(
            world,
            host_key="here",
            rendezvous=address,
            interface="lo",
            gloo_timeout_s=GLOO_TIMEOUT_S,
            stall_timeout_s=60,
        )
        environment = {**os.environ, **environment, "OMP_NUM_THREADS": "1"}
        processes.append(
            subprocess.Popen([sys.executable, "-c", RANK], env=environment, stdout=subprocess.PIPE, text=True)
        )
    try:
        printed = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads(each.splitlines()[-1]) for each in printed]


def check_all_failed(said: list[dict[str, object]]) -> None:
    for each in said:
        assert "Horovod initialization failed" in str(each["said"]), said
        assert float(str(each["seconds"])) < LIMIT_S, said


def test_a_world_takes_three_requests_a_rank() -> None:
    with contextlib.closing(Lossy()) as server:
        assert [each["said"] for each in run_ranks(server.address, 3)] == ["connected"] * 3
        # One host: the local group is the world, and no other host has ranks.
        assert server.requests.pop("global") == 3 * 3
        assert server.requests == {f"cross_{rank}": 2 for rank in range(3)}


def test_a_rendezvous_whose_port_is_dropped_is_an_error_on_every_rank() -> None:
    with place_that_drops_connections() as address:
        check_all_failed(run_ranks(address, 2))


def test_an_answer_to_one_rank_that_is_lost_is_an_error_on_every_rank() -> None:
    with contextlib.closing(Lossy(loses=("GET", "global/gathered.1.2"))) as server:
        check_all_failed(run_ranks(server.address, 2))
        assert server.requests["global"] >= 3
