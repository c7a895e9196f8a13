"""What comes from a rank is data, however it was made: it is understood or refused, and ends no process."""

from __future__ import annotations

import random
import socket
import struct
import subprocess
import sys
from typing import Any

import msgpack
import numpy
import pytest

from horovod_tune.channel.framing import Channel
from horovod_tune.channel.packing import MAX_TUPLES_DEEP, MalformedMessage, pack, unpack
from horovod_tune.channel.schema import RANK_MESSAGES

REPORT: dict[str, Any] = {"kind": "report", "run": 1, "index": 2, "metrics": {}, "checkpoint_path": None}
MESSAGES: list[dict[str, Any]] = [
    {"kind": "alive", "operations": 3},
    {**REPORT, "metrics": {"loss": 0.5, "pair": (1, 2), "big": 2**80}},
    {**REPORT, "metrics": {"a": numpy.arange(5), "b": (1,)}, "checkpoint_path": "/x"},
    {"kind": "failed", "failure_kind": 1, "traceback": "x"},
    {"kind": "stack", "stack": "s", "in_report": True},
]
# The beginnings of long extensions, strings, arrays and maps; deep arrays; a byte that nothing begins with.
PIECES = [
    *(b"\xc7\xff\x01", b"\xd9\xff", b"\xdd\x7f\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc8\x00\x03\x03"),
    *(b"\xc9\x00\x00\x00\x05\x02", b"\x91" * 600, b"\xc1"),
]


def mangled(data: bytes, source: random.Random) -> bytes:
    made = bytearray(data)
    for _ in range(source.randint(1, 5)):
        at = source.randrange(len(made) + 1)
        match source.randrange(5):
            case 0 if made:
                made[at % len(made)] = source.randrange(256)
            case 1:
                made[at:at] = source.randbytes(source.randrange(1, 12))
            case 2:
                del made[at : at + source.randrange(1, 9)]
            case 3:
                made[at:at] = source.choice(PIECES)
            case _:
                del made[at:]
    return bytes(made)


def nested(levels: int) -> bytes:
    """Return a report with tuples in tuples, as no rank sends it."""
    data: bytes = msgpack.packb([])
    for _ in range(levels):
        data = msgpack.packb([msgpack.ExtType(1, data)])
    packed: bytes = msgpack.packb({**REPORT, "metrics": {"a": msgpack.ExtType(1, data)}})
    return struct.pack(">I", len(packed)) + packed


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
        body = mangled(pack(source.choice(MESSAGES)), source)
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
