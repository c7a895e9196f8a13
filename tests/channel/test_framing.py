"""Messages between processes of a host come whole, and only those that the other end may send."""

from __future__ import annotations

import fcntl
import resource
import socket
import struct
from collections.abc import Iterator

import msgpack
import numpy
import pytest

from horovod_tune.channel.framing import MAX_REPORT_BYTES, Channel
from horovod_tune.channel.packing import MalformedMessage, pack
from horovod_tune.channel.schema import RANK_MESSAGES, check
from horovod_tune.errors import MetricsError


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    ours, theirs = socket.socketpair()
    yield Channel(ours, RANK_MESSAGES), theirs
    ours.close()
    theirs.close()


def frame(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def test_messages_come_whole_and_in_order_however_they_are_cut(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    data = frame(pack({"kind": "finished"})) + frame(pack({"kind": "stopped"}))
    got = []
    for i in range(len(data)):
        other.sendall(data[i : i + 1])
        messages, there = channel.receive(1)
        assert there
        got += messages
    assert got == [{"kind": "finished"}, {"kind": "stopped"}]
    other.shutdown(socket.SHUT_WR)
    assert channel.receive(1) == ([], False)


def test_what_could_carry_code_is_refused_at_the_sender() -> None:
    with pytest.raises(MetricsError, match="may carry numbers, text"):
        pack({"kind": "report", "metrics": {"f": print}})
    with pytest.raises(MetricsError, match="may carry numbers, text"):
        pack({"kind": "report", "metrics": {"objects": numpy.array([print])}})


def test_a_length_beyond_bounds_is_refused_before_it_is_waited_for(
    ends: tuple[Channel, socket.socket],
) -> None:
    channel, other = ends
    other.sendall(struct.pack(">I", (1 << 32) - 1))
    with pytest.raises(MalformedMessage, match="4294967295 bytes"):
        channel.receive(1)


def test_a_report_too_large_is_the_functions_error(ends: tuple[Channel, socket.socket]) -> None:
    channel, _ = ends
    with pytest.raises(MetricsError, match=f"may take {MAX_REPORT_BYTES} bytes"):
        channel.send("report", run=1, index=1, metrics={"x": bytes(MAX_REPORT_BYTES)}, checkpoint_path=None)


@pytest.mark.parametrize(
    "message",
    [
        None,
        {"no": "kind"},
        {"kind": "run", "code": "print()"},
        {"kind": "finished", "more": 1},
        {"kind": "report", "run": 1, "index": "1", "metrics": {}, "checkpoint_path": None},
        {"kind": "report", "run": 1, "index": True, "metrics": {}, "checkpoint_path": None},
        {"kind": "report", "run": 1, "index": 1, "metrics": [], "checkpoint_path": None},
        {"kind": "failed", "traceback": "x"},
        {"kind": "failed", "failure_kind": 99, "traceback": "x"},
        {"kind": "stack", "stack": "", "in_report": 1},
        {"kind": ["report"]},
    ],
    ids=repr,
)
def test_what_the_other_end_may_not_send_is_an_error(message: object) -> None:
    with pytest.raises(MalformedMessage, match=r"known kind|wrong type|unknown failure"):
        check(msgpack.unpackb(msgpack.packb(message)), RANK_MESSAGES)


def test_an_extension_of_others_is_an_error(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(frame(msgpack.packb({"kind": "finished", "x": msgpack.ExtType(77, b"")})))
    with pytest.raises(MalformedMessage):
        channel.receive(1)


def test_a_channel_that_was_closed_here_has_nothing_more(ends: tuple[Channel, socket.socket]) -> None:
    """As one whose thread closed it, because the other end had."""
    channel, _ = ends
    channel.close()
    assert channel.receive(0) == channel.receive(5.0) == channel.receive(None) == ([], False)


def test_descriptors_beyond_those_of_select_are_heard() -> None:
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
