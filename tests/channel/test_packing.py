"""Messages from a rank, however malformed, are only data: accepted or refused, they end no process."""

from __future__ import annotations

import fcntl
import random
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgpack
import numpy
import pytest
from processes import mangled

from horovod_tune.channel.framing import RANK_MESSAGES, Channel, check
from horovod_tune.channel.packing import MAX_TUPLES_DEEP, MalformedMessage, pack, unpack
from horovod_tune.errors import MetricsError

REPORT: dict[str, Any] = {"kind": "report", "run": 1, "index": 2, "metrics": {}, "checkpoint_path": None}
MESSAGES: list[dict[str, Any]] = [
    {"kind": "needs_world", "error": "", "stalled": "x"},
    {**REPORT, "metrics": {"loss": 0.5, "pair": (1, 2), "big": 2**80}},
    {**REPORT, "metrics": {"a": numpy.arange(5), "b": (1,)}, "checkpoint_path": "/x"},
    {"kind": "failed", "failure_kind": 1, "traceback": "x"},
    {"kind": "reply", "id": 3, "value": True, "error": ""},
]
# The beginnings of long extensions, strings, arrays and maps; deep arrays; a byte that nothing begins with.
PIECES = [
    *(b"\xc7\xff\x01", b"\xd9\xff", b"\xdd\x7f\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc8\x00\x03\x03"),
    *(b"\xc9\x00\x00\x00\x05\x02", b"\x91" * 600, b"\xc1"),
]


def frame(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def nested(levels: int) -> bytes:
    """Return a report with tuples in tuples, as no rank sends it."""
    data: bytes = msgpack.packb([])
    for _ in range(levels):
        data = msgpack.packb([msgpack.ExtType(1, data)])
    return frame(msgpack.packb({**REPORT, "metrics": {"a": msgpack.ExtType(1, data)}}))


@pytest.mark.parametrize("levels", [MAX_TUPLES_DEEP, 200, 5000])
def test_tuples_nested_too_deep_are_refused_and_end_no_process(levels: int) -> None:
    # In a process of its own: this once was a segmentation fault.
    program = """
import socket, sys
from horovod_tune.channel.packing import MalformedMessage
from horovod_tune.channel.report_channel import CoordinatorChannel
one, other = socket.socketpair()
other.sendall(sys.stdin.buffer.read())
try:
    CoordinatorChannel(one).receive()
except MalformedMessage as error:
    print("refused:", error)
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], input=nested(levels), capture_output=True, timeout=120
    )
    assert ran.returncode == 0, f"ended with {ran.returncode}"
    assert b"refused: " in ran.stdout and b"deep" in ran.stdout


def test_what_is_nested_less_arrives() -> None:
    value: Any = 1
    for _ in range(MAX_TUPLES_DEEP - 1):
        value = (value,)
    assert unpack(pack({"a": value})) == {"a": value}


@pytest.mark.parametrize("seed", range(3))
def test_mangled_frames_of_a_channel_are_read_or_refused(seed: int) -> None:
    source, refused = random.Random(seed), 0
    for _ in range(2000):
        body = mangled(pack(source.choice(MESSAGES)), source, PIECES)
        honest = source.random() < 0.8
        length = (
            len(body) if honest else source.choice([0, 1, len(body) // 2, 1 << 20, (1 << 30) + 1, 2**32 - 1])
        )
        ours, theirs = socket.socketpair()
        channel = Channel(ours, RANK_MESSAGES)
        with theirs:
            theirs.sendall(struct.pack(">I", length) + body)
        try:
            channel.receive(5.0)
        except MalformedMessage:
            refused += 1
        finally:
            channel.close()
    assert 600 < refused < 2000


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield Channel(ours, RANK_MESSAGES), theirs
    ours.close()
    theirs.close()


def test_messages_come_whole_and_in_order_however_they_are_cut(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    data = frame(pack({"kind": "finished", "rank": 0, "has_returned": 1})) + frame(
        pack({"kind": "needs_world", "error": "", "stalled": "x"})
    )
    got = []
    for i in range(len(data)):
        other.sendall(data[i : i + 1])
        messages, there = channel.receive(1)
        assert there
        got += messages
    assert got == [
        {"kind": "finished", "rank": 0, "has_returned": 1},
        {"kind": "needs_world", "error": "", "stalled": "x"},
    ]
    other.shutdown(socket.SHUT_WR)
    assert channel.receive(1) == ([], False)


def test_what_could_carry_code_is_refused_at_the_sender() -> None:
    with pytest.raises(MetricsError, match="can send only numbers, text"):
        pack({"kind": "report", "metrics": {"f": print}})
    with pytest.raises(MetricsError, match="can send only numbers, text"):
        pack({"kind": "report", "metrics": {"objects": numpy.array([print])}})


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (struct.pack(">I", (1 << 32) - 1), "4294967295 bytes"),  # which it does not wait for
        (frame(msgpack.packb({"kind": "finished", "has_returned": msgpack.ExtType(77, b"")})), "type 77"),
    ],
)
def test_a_length_beyond_bounds_or_an_unknown_type_is_an_error(
    ends: tuple[Channel, socket.socket], data: bytes, text: str
) -> None:
    channel, other = ends
    other.sendall(data)
    with pytest.raises(MalformedMessage, match=text):
        channel.receive(1)


@pytest.mark.parametrize(
    "message",
    [
        None,
        {"no": "kind"},
        {"kind": "run", "code": "print()"},
        {"kind": "finished", "rank": 0, "has_returned": 1, "more": 1},
        {"kind": "report", "run": 1, "index": "1", "metrics": {}, "checkpoint_path": None},
        {"kind": "report", "run": 1, "index": True, "metrics": {}, "checkpoint_path": None},
        {"kind": "report", "run": 1, "index": 1, "metrics": [], "checkpoint_path": None},
        {"kind": "failed", "traceback": "x"},
        {"kind": "failed", "failure_kind": 99, "traceback": "x"},
        {"kind": "imports", "seconds": 1},
        {"kind": ["report"]},
    ],
    ids=repr,
)
def test_what_the_other_end_may_not_send_is_an_error(message: object) -> None:
    with pytest.raises(MalformedMessage, match=r"known kind|wrong type|unknown failure"):
        check(msgpack.unpackb(msgpack.packb(message)), RANK_MESSAGES)


def test_a_channel_that_was_closed_here_has_nothing_more(ends: tuple[Channel, socket.socket]) -> None:
    """As one whose thread closed it, because the other end had."""
    channel, _ = ends
    channel.close()
    assert channel.receive(0) == channel.receive(5.0) == channel.receive(None) == ([], False)


def test_descriptors_beyond_the_limit_of_select_are_polled() -> None:
    """A coordinator of a thousand ranks has some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    here, there = socket.socketpair()
    far = socket.socket(fileno=fcntl.fcntl(here, fcntl.F_DUPFD, 1100))
    here.close()
    try:
        channel = Channel(far, RANK_MESSAGES)
        assert channel.fileno() >= 1100 and channel.receive(0.01) == ([], True)
        there.close()
        assert channel.receive(5.0) == ([], False)
        channel.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
