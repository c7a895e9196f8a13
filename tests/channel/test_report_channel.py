"""The channel between a coordinator and the ranks on its host: only for authenticated ranks and data."""

from __future__ import annotations

import datetime
import math
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy
import pytest

from horovod_tune.channel.report_channel import (
    MAX_REPORT_BYTES,
    CoordinatorChannel,
    Listener,
    RankChannel,
    hand_over,
)
from horovod_tune.messages import CheckpointPlace, Report


def connected(token: Any) -> socket.socket:
    """Return a rank's end of a channel, whose other end its actor has handed over."""
    ours, theirs = socket.socketpair()
    with theirs:
        hand_over(token, theirs)
    return ours


@pytest.fixture
def ends() -> Iterator[tuple[CoordinatorChannel, RankChannel]]:
    house = Listener()
    rank = RankChannel(connected(house.create_token(0)))
    channel = house.accept()[0]
    yield channel, rank
    channel.close()


def released(rank: RankChannel, count: int) -> list[tuple[int, float, CheckpointPlace | None]]:
    """Return the next ``count`` acknowledgements that a rank receives."""
    received: list[Any] = []
    done = threading.Event()

    def record(*release: Any) -> None:
        received.append(release)
        if len(received) == count:
            done.set()

    threading.Thread(target=rank.listen, args=(record,), daemon=True).start()
    assert done.wait(30)
    return received


def test_reports_arrive_in_order_with_their_types(ends: tuple[CoordinatorChannel, RankChannel]) -> None:
    channel, rank = ends
    metrics = {"loss": math.nan, "epoch": 3, "name": "ä", "pair": (1, 2), "big": 1 << 80, "nested": {1: None}}
    first, second = Report(1, metrics, None), Report(2, {"loss": math.inf}, "/a/checkpoint")
    assert rank.report(7, first)
    assert rank.report(7, second)
    (run, got), (_, last) = channel.receive()
    assert math.isnan(got.metrics.pop("loss"))
    del metrics["loss"]
    assert (run, got, last) == (7, first, second)
    assert channel.receive() == []


def test_an_acknowledgement_brings_its_checkpoint_and_the_end_of_waiting(
    ends: tuple[CoordinatorChannel, RankChannel],
) -> None:
    channel, rank = ends
    place = CheckpointPlace("/storage/checkpoint_000001", None, "a node", 3)
    assert channel.acknowledge(2, 3, place)
    assert channel.acknowledge(2, math.inf, None)
    assert released(rank, 2) == [(2, 3, place), (2, math.inf, None)]


def test_what_does_not_fit_is_left_to_the_other_way(ends: tuple[CoordinatorChannel, RankChannel]) -> None:
    channel, rank = ends
    nested: dict[str, Any] = {}
    for _ in range(2000):
        nested = {"deeper": nested}
    structured, masked = numpy.zeros(2, "i4,f8"), numpy.ma.array([1, 2], mask=[0, 1])
    for value in (datetime.date(2026, 1, 1), b"1" * MAX_REPORT_BYTES, nested, structured, masked):
        assert not rank.report(1, Report(1, {"x": value}))
    assert not channel.acknowledge(1, 1, CheckpointPlace("bucket/path", filesystem=object()))
    assert channel.receive() == []


def test_only_a_rank_with_the_secret_is_accepted_and_only_once() -> None:
    house = Listener()
    token = house.create_token(0)
    strangers = [
        RankChannel(connected(replace(token, secret=bytes(32)))),
        RankChannel(connected(replace(token, secret=b""))),
    ]
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    silent.connect(token.address)
    invited, again = RankChannel(connected(token)), RankChannel(connected(token))
    channels = house.accept()
    assert set(channels) == {0}
    assert invited.report(1, Report(1, {}))
    assert channels[0].receive() == [(1, Report(1, {}))]
    for one in [*strangers, again]:
        assert not one.report(1, Report(1, {"x": 1}))
    with pytest.raises(OSError, match="refused"):
        RankChannel(connected(token))  # the listener has closed it
    silent.close()
    channels[0].close()


def test_a_rank_that_is_gone_closes_its_channel(ends: tuple[CoordinatorChannel, RankChannel]) -> None:
    channel, rank = ends
    assert rank.report(1, Report(1, {"last": 1}))
    rank.close()
    assert channel.receive() == [(1, Report(1, {"last": 1}))]
    assert channel.receive() == []
    assert not channel.is_open
    assert not channel.acknowledge(1, 1, None)


def test_a_rank_that_does_not_read_never_holds_up_the_coordinator(
    ends: tuple[CoordinatorChannel, RankChannel],
) -> None:
    channel, rank = ends
    sent = 0
    while channel.acknowledge(1, sent + 1, CheckpointPlace("/a" * (sent % 90), None, "node", sent)):
        sent += 1
        assert sent < 100_000
    assert sent
    # However little of the last one fitted: a report still arrives, and what was sent is received completely.
    assert not channel.acknowledge(1, sent + 1, None)
    assert rank.report(1, Report(1, {"x": 1}))
    assert channel.receive() == [(1, Report(1, {"x": 1}))]
    received = released(rank, sent)
    assert [index for _, index, _ in received] == list(range(1, sent + 1))
