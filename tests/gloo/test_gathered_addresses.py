"""The rendezvous gives each rank all that the others have put for it in one answer, when all have come."""

from __future__ import annotations

import http.client
import random
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor

import pytest

from horovod_tune.gloo.rendezvous import Rendezvous, addresses_for

WAIT_S = 20.0


@pytest.fixture
def server() -> Iterator[Rendezvous]:
    with Rendezvous("127.0.0.1") as server:
        yield server


def ask(server: Rendezvous, method: str, name: str, body: bytes | None = None) -> tuple[int, bytes]:
    place, _, secret = server.address.partition("/")
    connection = http.client.HTTPConnection(place, timeout=WAIT_S)
    try:
        connection.request(method, f"/{secret}:0/{name}", body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def put_of(rank: int, size: int) -> bytes:
    """Return what a rank puts: six bytes for each other rank that tell whose they are and for whom."""
    return b"".join(b"%02d>%02d;" % (rank, other) for other in range(size) if other != rank)


@pytest.mark.parametrize("size", [2, 3, 17])
def test_each_rank_gets_what_the_others_have_put_for_it(server: Rendezvous, size: int) -> None:
    def meet(rank: int) -> bytes:
        assert ask(server, "PUT", f"global/{rank}", put_of(rank, size)) == (200, b"")
        status, body = ask(server, "GET", f"global/gathered.{rank}.{size}")
        assert status == 200
        return body

    with ThreadPoolExecutor(size) as pool:
        said = list(pool.map(meet, range(size)))
    assert said == [
        b"".join(b"%02d>%02d;" % (other, rank) for other in range(size) if other != rank)
        for rank in range(size)
    ]


def test_nobody_is_answered_before_the_last_rank_has_come(server: Rendezvous) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(ask, server, "GET", f"global/gathered.{rank}.3") for rank in range(2)]
        for rank in range(2):
            ask(server, "PUT", f"global/{rank}", put_of(rank, 3))
        with pytest.raises(futures.TimeoutError):
            waiting[0].result(timeout=0.3)
        ask(server, "PUT", "global/2", put_of(2, 3))
        assert waiting[0].result(timeout=WAIT_S) == (200, b"01>00;02>00;")
        assert waiting[1].result(timeout=WAIT_S) == (200, b"00>01;02>01;")


def test_scopes_do_not_mix(server: Rendezvous) -> None:
    ask(server, "PUT", "local_a/0", put_of(0, 2))
    ask(server, "PUT", "local_b/1", b"other.")
    ask(server, "PUT", "local_a/1", put_of(1, 2))
    assert ask(server, "GET", "local_a/gathered.0.2") == (200, b"01>00;")


def test_the_next_world_gets_its_own_addresses(server: Rendezvous) -> None:
    for world in (b"first.", b"second"):
        for rank in range(2):
            ask(server, "PUT", f"global/{rank}", world)
        assert ask(server, "GET", "global/gathered.1.2") == (200, world)
        for rank in range(2):
            ask(server, "DELETE", f"global/{rank}")


@pytest.mark.parametrize(
    ("puts", "name"),
    [
        ({0: b"12", 1: b"12"}, "gathered.2.2"),  # a rank that its world has not
        ({0: b"12", 1: b"12", 2: b"12"}, "gathered.0.2"),  # one rank too many
        ({0: b"12", 2: b"12"}, "gathered.0.2"),  # one that is missing
        ({0: b"1234", 1: b"12"}, "gathered.0.2"),  # not of one length
        ({0: b"123", 1: b"123", 2: b"123"}, "gathered.0.3"),  # not a whole number of addresses
        ({0: b"12"}, "gathered.0.0"),
    ],
)
def test_what_no_world_asks_gets_no_answer_and_harms_nobody(
    server: Rendezvous, puts: dict[int, bytes], name: str
) -> None:
    for rank, body in puts.items():
        ask(server, "PUT", f"bad/{rank}", body)
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        ask(server, "GET", f"bad/{name}")
    for rank in range(2):
        ask(server, "PUT", f"global/{rank}", put_of(rank, 2))
    assert ask(server, "GET", "global/gathered.0.2") == (200, b"01>00;")


def test_a_rank_that_asks_again_is_the_one_that_is_answered(server: Rendezvous) -> None:
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, server, "GET", "global/gathered.0.2")
        with pytest.raises(futures.TimeoutError):
            first.result(timeout=0.2)
        second = pool.submit(ask, server, "GET", "global/gathered.0.2")
        with pytest.raises(futures.TimeoutError):
            second.result(timeout=0.2)
        for rank in range(2):
            ask(server, "PUT", f"global/{rank}", put_of(rank, 2))
        assert second.result(timeout=WAIT_S) == (200, b"01>00;")
        assert first.result(timeout=WAIT_S)[0] in (200, 404)  # after 404 a rank asks again, as Horovod does


@pytest.mark.parametrize("seed", range(20))
def test_addresses_are_those_that_gloo_would_pick(seed: int) -> None:
    source = random.Random(seed)
    size, length = source.randint(2, 40), source.choice([1, 24, 152])
    put = {rank: source.randbytes(length * (size - 1)) for rank in range(size)}

    def extract(mine: int, other: int) -> bytes:
        """`Context::extractAddress` of Gloo."""
        place = mine - 1 if mine > other else mine
        return put[other][place * length : (place + 1) * length]

    for rank in range(size):
        expected = b"".join(extract(rank, other) for other in range(size) if other != rank)
        assert addresses_for(rank, size, put) == expected
