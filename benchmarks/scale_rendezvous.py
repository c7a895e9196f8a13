"""Simulates the ranks of a world against the real rendezvous, without torch, Ray or Horovod.

The rendezvous runs in a process of its own, whose CPU time is measured; two processes simulate the ranks. A
rank connects three times, as `hvd.init()` does: with all ranks, with those of its host, and with those of the
same local rank on every host.
"""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from horovod_tune.actors import ranks
from horovod_tune.backends.horovod.rendezvous import Rendezvous
from horovod_tune.messages import RankInfo

RANKS_PER_HOST = 8
CLIENTS = 2
# What Gloo stores for each peer: a socket address, a sequence number, a token.
ADDRESS_BYTES = 152


@dataclass(frozen=True)
class Group:
    """One Gloo context of a rank: its scope in the rendezvous, and the rank's place in it."""

    scope: str
    rank: int
    size: int


def groups_of(world: RankInfo, host: str) -> list[Group]:
    return [
        Group("global", world.rank, world.size),
        Group(f"local_{host}", world.local_rank, world.local_size),
        Group(f"cross_{world.local_rank}", world.cross_rank, world.cross_size),
    ]


class Client:
    """Sends requests as Horovod's `http_store.cc` does, one per connection."""

    def __init__(self, address: str) -> None:
        place, _, self._secret = address.partition("/")
        host, port = place.split(":")
        self._place = (host, int(port))
        self.requests = self.bytes = 0

    def open(self, method: str, path: str, body: bytes = b"") -> socket.socket:
        end = socket.create_connection(self._place, timeout=600)
        head = f"{method} /{self._secret}:0/{path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        end.sendall(head.encode() + body)
        self.requests += 1
        self.bytes += len(head) + len(body)
        return end

    def read(self, end: socket.socket) -> bytes:
        with end:
            answer = b"".join(iter(lambda: end.recv(1 << 18), b""))
        self.bytes += len(answer)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        return body

    def ask(self, method: str, path: str, body: bytes = b"") -> bytes:
        return self.read(self.open(method, path, body))


def play(client: Client, mine: list[Group], *, gathers: bool) -> None:
    """Make ranks connect in one Gloo context each."""
    for group in mine:
        if not gathers:
            client.ask("PUT", f"{group.scope}/rank_{group.rank}", b"host")
        # In this simulation, a rank's addresses contain its number.
        own = group.rank.to_bytes(2, "big") * (ADDRESS_BYTES // 2) * (group.size - 1)
        client.ask("PUT", f"{group.scope}/{group.rank}", own)
    if gathers:
        waiting = [
            client.open("GET", f"{each.scope}/gathered.{each.rank}.{each.size}")
            for each in mine
            if each.size > 1
        ]
        for group, end in zip([each for each in mine if each.size > 1], waiting, strict=True):
            theirs = client.read(end)
            others = [each for each in range(group.size) if each != group.rank]
            assert theirs[::ADDRESS_BYTES] + theirs[1::ADDRESS_BYTES] == bytes(
                [each >> 8 for each in others] + [each & 255 for each in others]
            )
        return
    for group in mine:
        for other in range(group.rank):
            client.ask("GET", f"{group.scope}/rank_{other}")
        for other in range(group.size):
            if other != group.rank:
                client.ask("GET", f"{group.scope}/{other}")  # checks that it exists
                client.ask("GET", f"{group.scope}/{other}")


def run_client(number: int, size: int, *, gathers: bool) -> None:
    """Simulate every second rank; stdin has a line with the address, and one to start each phase."""
    client = Client(sys.stdin.readline().strip())
    hosts = [f"host{rank // RANKS_PER_HOST}" for rank in range(size)]
    rank_infos = ranks.assign_ranks(hosts, first_node="host0")
    mine = [groups_of(world, host) for world, host in zip(rank_infos, hosts, strict=True)][number::CLIENTS]
    print("ready", flush=True)
    for context in range(3):
        for verb in ("meet", "leave"):
            assert sys.stdin.readline().strip() == verb
            groups = [each[context] for each in mine]
            if verb == "meet":
                play(client, groups, gathers=gathers)
            else:  # after the barrier of a context
                for group in groups:
                    client.ask("DELETE", f"{group.scope}/{group.rank}")
            print("done", flush=True)
    print(json.dumps({"requests": client.requests, "bytes": client.bytes}), flush=True)


def run_server() -> None:
    """Serve until stdin ends; then print the CPU time and memory that were used."""
    with contextlib.closing(Rendezvous("127.0.0.1")) as server:
        before = _cpu_s()
        print(server.address, flush=True)
        sys.stdin.read()
        used = _cpu_s() - before
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"cpu_s": used, "peak_mb": peak_mb}), flush=True)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


@contextlib.contextmanager
def _program(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "benchmarks.scale_rendezvous", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    if not line:
        raise RuntimeError(f"{process.args} exited with {process.wait()}")
    return line


def measure(size: int, *, gathers: bool) -> dict[str, float]:
    """Return the costs of a world of ``size`` ranks: seconds, the rendezvous's CPU, requests, megabytes."""
    way = "gathers" if gathers else "pairs"
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_program("server"))
        address = _line(server)
        clients = [stack.enter_context(_program("client", str(n), str(size), way)) for n in range(CLIENTS)]

        def send(text: str) -> None:
            for each in clients:
                assert each.stdin is not None
                each.stdin.write(text + "\n")
                each.stdin.flush()

        send(address)
        assert {_line(each) for each in clients} == {"ready"}
        began = time.monotonic()
        for _ in range(3):
            for verb in ("meet", "leave"):
                send(verb)
                assert {_line(each) for each in clients} == {"done"}
        took_s = time.monotonic() - began
        sent = [json.loads(_line(each)) for each in clients]
        assert server.stdin is not None
        server.stdin.close()
        served = json.loads(_line(server))
        server.stdin = None
    return {
        "seconds": took_s,
        "cpu_s": served["cpu_s"],
        "requests": sum(each["requests"] for each in sent),
        "megabytes": sum(each["bytes"] for each in sent) / 1e6,
        "peak_mb": served["peak_mb"],
    }


if __name__ == "__main__":
    if sys.argv[1] == "server":
        run_server()
    else:
        run_client(int(sys.argv[2]), int(sys.argv[3]), gathers=sys.argv[4] == "gathers")
