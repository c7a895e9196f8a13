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

from horovod_tune.channel import packets
from horovod_tune.channel.packing import MAX_TUPLES_DEEP, pack, unpack
from horovod_tune.channel.stream import Channel, MalformedMessage, check_rank_message

REPORTS: list[dict[str, Any]] = [
    {"run": 1, "index": 2, "metrics": {"loss": 0.5, "pair": (1, 2), "big": 2**80}, "path": None},
    {"run": 1, "index": 2, "metrics": {"curve": numpy.arange(10.0)}, "path": "/x"},
]
RANK_MESSAGES: list[dict[str, Any]] = [
    {"kind": "alive", "operations": 3},
    {"kind": "report", "index": 1, "metrics": {"a": numpy.arange(5), "b": (1,)}, "checkpoint_path": None},
    {"kind": "failed", "failure_kind": 1, "traceback": "x"},
    {"kind": "stands", "stack": "s", "reports": True},
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
    """Return a report with tuples in tuples, as no rank of ours makes it."""
    data: bytes = msgpack.packb([])
    for _ in range(levels):
        data = msgpack.packb([msgpack.ExtType(1, data)])
    metrics = {"a": msgpack.ExtType(1, data)}
    packed: bytes = msgpack.packb({"run": 1, "index": 1, "metrics": metrics, "path": None})
    return packed


@pytest.mark.parametrize("levels", [MAX_TUPLES_DEEP, 200, 5000])
def test_tuples_nested_too_deep_are_refused_and_end_no_process(levels: int) -> None:
    # In a process of its own: this once was a segmentation fault.
    program = """
import sys
from horovod_tune.channel import packets
try:
    packets._check_report(sys.stdin.buffer.read())
except packets.MalformedMessage as error:
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
def test_mangled_reports_are_read_or_refused(seed: int) -> None:
    source, refused = random.Random(seed), 0
    for _ in range(2000):
        data = mangled(pack(source.choice(REPORTS)), source)
        try:
            packets._check_report(data)
        except packets.MalformedMessage:
            refused += 1
    assert 1000 < refused < 2000


@pytest.mark.parametrize("seed", range(3))
def test_mangled_frames_of_a_channel_are_read_or_refused(seed: int) -> None:
    source, refused = random.Random(seed), 0
    for _ in range(1000):
        body = mangled(pack(source.choice(RANK_MESSAGES)), source)
        honest = source.random() < 0.8
        length = (
            len(body) if honest else source.choice([0, 1, len(body) // 2, 1 << 20, (1 << 30) + 1, 2**32 - 1])
        )
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        with theirs:
            theirs.sendall(struct.pack(">I", length) + body)
        try:
            messages, _ = channel.receive(5.0)
            for message in messages:
                check_rank_message(message)
        except MalformedMessage:
            refused += 1
        finally:
            channel.close()
    assert 300 < refused < 1000
