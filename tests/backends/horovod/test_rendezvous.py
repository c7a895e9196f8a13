"""The rendezvous serves only ranks with its secret: values, and to each rank what all others put for it."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import socket
import subprocess
import sys
import threading
import time
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import eventually, mangled

from horovod_tune.backends.horovod import rendezvous
from horovod_tune.backends.horovod.rendezvous import Rendezvous, addresses_for

WAIT_S = 20.0
ENDLESS = b"x" * (rendezvous.MAX_REQUEST_BYTES + 70000)
# What the server's event loop opens when its thread runs.
LOOPS_FILES = 3


@pytest.fixture
def server():
    with contextlib.closing(Rendezvous("127.0.0.1")) as server:
        yield server


def endpoint(server):
    place, _, secret = server.address.partition("/")
    address, port = place.split(":")
    return address, int(port), secret


def ask(server, method, name, body=None, *, secret=None):
    """Send one request as Horovod does (the port repeated behind the secret); return status and body."""
    address, port, right = endpoint(server)
    connection = http.client.HTTPConnection(address, port, timeout=WAIT_S)
    try:
        connection.request(method, f"/{right if secret is None else secret}:0/{name}", body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def raw(server, data):
    """Send bytes as they are and return all that comes back."""
    address, port, _ = endpoint(server)
    with socket.create_connection((address, port), timeout=WAIT_S) as stranger:
        received = b""
        try:
            stranger.sendall(data)
            while chunk := stranger.recv(4096):
                received += chunk
        except (ConnectionResetError, BrokenPipeError):
            pass
        return received


def is_fine(server, name="own/0"):
    """Return True if what is put can be got."""
    return ask(server, "PUT", name, b"\x00\xff") == (200, b"") and ask(server, "GET", name) == (
        200,
        b"\x00\xff",
    )


def test_each_scope_has_keys_of_its_own(server):
    assert is_fine(server, "global/0")
    assert ask(server, "PUT", "local/0", b"other") == (200, b"")
    assert ask(server, "GET", "global/0") == (200, b"\x00\xff")


def test_a_get_waits_for_its_put(server):
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(ask, server, "GET", "global/1") for _ in range(2)]
        assert ask(server, "PUT", "global/other", b"x") == (200, b"")
        assert not any(each.done() for each in waiting)
        ask(server, "PUT", "global/1", b"here")
        assert [each.result(timeout=WAIT_S) for each in waiting] == [(200, b"here")] * 2


def test_a_get_that_waits_too_long_has_to_be_repeated(server, monkeypatch):
    monkeypatch.setattr(rendezvous, "HOLD_TIMEOUT_S", 0.05)
    assert ask(server, "GET", "global/never")[0] == 404
    assert is_fine(server, "global/never")


@pytest.mark.parametrize("secret", ["", "wrong", "x" * 5000])
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_without_the_secret_there_is_no_answer_and_no_effect(server, method, secret):
    ask(server, "PUT", "global/0", b"ours")
    with pytest.raises((http.client.BadStatusLine, ConnectionError)):
        ask(server, method, "global/0", b"theirs", secret=secret)
    assert ask(server, "GET", "global/0") == (200, b"ours")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\r\n\r\n",
        b"\x80\x04\x95cposix\nsystem\n\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\n\r\n",
        b"BREW /SECRET/global/0 HTTP/1.1\r\n\r\n",
        *(
            f"PUT /{secret}/global/0 HTTP/1.1\r\nContent-Length: {length}\r\n\r\n".encode()
            for secret in ("", "SECRET")
            for length in ("1" * 5000, "9" * 500, "9" * 20, "-1", "many", "0x10", "\u00b2", "")
        ),
        ENDLESS,
        b"PUT /SECRET:0/global/1 HTTP/1.1\r\nContent-Length: 999999999\r\n\r\n" + ENDLESS,
    ],
    ids=lambda garbage: garbage[:40],
)
def test_malformed_requests_are_dropped_and_disturb_no_other(server, garbage):
    assert raw(server, garbage.replace(b"SECRET", endpoint(server)[2].encode())) == b""
    assert is_fine(server)


def test_an_answer_larger_than_a_sockets_buffer_arrives_whole(server):
    body = os.urandom(3 << 20)
    assert ask(server, "PUT", "global/0", body) == (200, b"")
    address, port, secret = endpoint(server)
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.settimeout(WAIT_S)
    slow.connect((address, port))
    with slow:
        slow.sendall(f"GET /{secret}/global/0 HTTP/1.1\r\n\r\n".encode())
        # Others are served while this one reads.
        assert ask(server, "GET", "global/0") == (200, body)
        received = b"".join(iter(lambda: slow.recv(1 << 16), b""))
    assert received.partition(b"\r\n\r\n")[2] == body


@pytest.mark.long
def test_a_peer_that_does_not_read_its_answer_is_dropped(server, monkeypatch):
    size = 32_000_000  # more than the kernel holds for the two ends
    monkeypatch.setattr(rendezvous, "MAX_REQUEST_BYTES", 2 * size)
    ask(server, "PUT", "global/0", bytes(size))
    monkeypatch.setattr(rendezvous, "RESPONSE_TIMEOUT_S", 0.1)
    address, port, secret = endpoint(server)
    with socket.create_connection((address, port), timeout=WAIT_S) as deaf:
        deaf.sendall(f"GET /{secret}/global/0 HTTP/1.1\r\n\r\n".encode())
        deaf.recv(1, socket.MSG_PEEK)  # the answer has begun, so the connection is known
        time.sleep(1.0)  # longer than the answer may take
        received = b"".join(iter(lambda: deaf.recv(1 << 16), b""))
    assert len(received) < size
    monkeypatch.undo()
    assert is_fine(server)


SERVER_WITH_FEW_FILES = """
import contextlib, os, resource
from horovod_tune.backends.horovod.rendezvous import Rendezvous
with contextlib.closing(Rendezvous("127.0.0.1")) as server:
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    print(server.address, flush=True)
    input()
    own = []
    with contextlib.suppress(OSError):
        while True:
            own.append(os.open("/dev/null", os.O_RDONLY))
    print("taken", flush=True)
    input()
    for each in own:
        os.close(each)
    input()
"""


@pytest.fixture
def poor():
    """A rendezvous in a process that may have 64 files: a line makes it take all, the next one frees them."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER_WITH_FEW_FILES],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    process.address = process.stdout.readline().strip()
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.long
def test_idle_connections_that_use_up_the_files_do_not_end_it(poor):
    address, port, _ = endpoint(poor)
    with contextlib.ExitStack() as idle:
        for _ in range(200):
            idle.enter_context(socket.create_connection((address, port), timeout=WAIT_S))
        assert all(is_fine(poor, f"global/{rank}") for rank in range(5))


@pytest.mark.long
def test_a_process_that_has_no_file_left_serves_again_when_it_has(poor):
    poor.stdin.write("\n")
    poor.stdin.flush()
    assert poor.stdout.readline() == "taken\n"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ask, poor, "PUT", "global/0", b"fine")
        # It sees the connection and cannot take it.
        with pytest.raises(futures.TimeoutError):
            waiting.result(timeout=0.5)
        poor.stdin.write("\n")
        poor.stdin.flush()
        assert waiting.result(timeout=WAIT_S) == (200, b"")


PIECES = [b"\r\n", b"\r\n\r\n", b":", b"/", b"Content-Length: ", b"-1", b"9" * 30, bytes(10)]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_mangled_requests_neither_end_it_nor_stay(server, monkeypatch, seed):
    monkeypatch.setattr(rendezvous, "REQUEST_TIMEOUT_S", 1.0)
    monkeypatch.setattr(rendezvous, "HOLD_TIMEOUT_S", 0.1)
    source = random.Random(seed)
    address, port, secret = endpoint(server)
    files = len(os.listdir("/proc/self/fd"))
    for _ in range(300):
        known = secret if source.random() < 0.7 else "A" * 32
        method = source.choice(["PUT", "GET", "DELETE", "POST"])
        body = source.randbytes(source.choice([0, 1, 20, 5000]))
        head = f"{method} /{known}:80/s{source.randrange(5)}/{source.randrange(9)} HTTP/1.1\r\nHost: x\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        sent = mangled(request, source, PIECES) if source.random() < 0.9 else source.randbytes(300)
        client = socket.create_connection((address, port), timeout=WAIT_S)
        with client, contextlib.suppress(ConnectionError):
            client.sendall(sent)
            client.shutdown(socket.SHUT_WR)
            while client.recv(1 << 16):
                pass
    assert is_fine(server)
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= files + LOOPS_FILES)


def test_a_client_that_sends_a_byte_at_a_time_blocks_no_other_and_is_dropped(server, monkeypatch):
    monkeypatch.setattr(rendezvous, "REQUEST_TIMEOUT_S", 0.3)
    address, port, _ = endpoint(server)
    with socket.create_connection((address, port), timeout=WAIT_S) as stranger:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < began + WAIT_S:
                stranger.sendall(b"G")
                assert is_fine(server)
                time.sleep(0.05)
        assert time.monotonic() - began < WAIT_S


def test_more_connections_than_allowed_do_no_harm(server, monkeypatch):
    monkeypatch.setattr(rendezvous, "MAX_UNAUTHENTICATED", 4)
    address, port, _ = endpoint(server)
    with contextlib.ExitStack() as strangers:
        made = [
            strangers.enter_context(socket.create_connection((address, port), timeout=WAIT_S))
            for _ in range(5)
        ]
        assert made[0].recv(1) == b"", "the oldest is closed"
        assert is_fine(server)


def test_keys_are_forgotten_when_all_ranks_have_connected(server, monkeypatch):
    """So that a later hvd.init() does not read the addresses of the one before."""
    monkeypatch.setattr(rendezvous, "HOLD_TIMEOUT_S", 0.1)
    for rank in range(3):
        ask(server, "PUT", f"global/{rank}", b"first world")
    for name in (b"second world", b"third world"):
        for rank in range(2):
            assert ask(server, "DELETE", f"global/{rank}") == (200, b"")
        ask(server, "PUT", "global/0", name)  # a quick rank, before the last one has said goodbye
        assert ask(server, "DELETE", "global/2") == (200, b"")
        assert ask(server, "GET", "global/0") == (200, name)
        assert ask(server, "GET", "global/1") == (404, b"")
        for rank in (1, 2):
            ask(server, "PUT", f"global/{rank}", name)


def test_close_ends_the_port_the_thread_and_every_connection():
    before = set(threading.enumerate())
    files = len(os.listdir("/proc/self/fd"))
    server = Rendezvous("127.0.0.1")
    address, port, _ = endpoint(server)
    stranger = socket.create_connection((address, port), timeout=WAIT_S)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(ask, server, "GET", "global/never")
        assert ask(server, "PUT", "global/0", b"x") == (200, b"")
        server.close()
        server.close()
        with pytest.raises((http.client.HTTPException, ConnectionError)):
            held.result(timeout=WAIT_S)
    assert stranger.recv(1) == b""
    stranger.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address, port), timeout=WAIT_S)
    assert set(threading.enumerate()) == before
    assert len(os.listdir("/proc/self/fd")) == files


def put_of(rank: int, size: int) -> bytes:
    """Return what a rank puts: six bytes for each other rank that tell whose they are and for whom."""
    return b"".join(b"%02d>%02d;" % (rank, other) for other in range(size) if other != rank)


def test_no_rank_is_answered_before_the_last_one_has_come(server) -> None:
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(ask, server, "GET", f"global/gathered.{rank}.3") for rank in range(2)]
        for rank in range(2):
            ask(server, "PUT", f"global/{rank}", put_of(rank, 3))
        with pytest.raises(futures.TimeoutError):
            waiting[0].result(timeout=0.3)
        ask(server, "PUT", "global/2", put_of(2, 3))
        assert waiting[0].result(timeout=WAIT_S) == (200, b"01>00;02>00;")
        assert waiting[1].result(timeout=WAIT_S) == (200, b"00>01;02>01;")


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
def test_what_no_world_asks_gets_no_answer_and_does_no_harm(
    server, puts: dict[int, bytes], name: str
) -> None:
    for rank, body in puts.items():
        ask(server, "PUT", f"bad/{rank}", body)
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        ask(server, "GET", f"bad/{name}")
    assert is_fine(server)


@pytest.mark.parametrize("seed", range(5))
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
