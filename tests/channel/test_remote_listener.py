"""Ranks of other hosts connect with the secret of their assignment; others are turned away."""

from __future__ import annotations

import contextlib
import queue
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from horovod_tune.channel import listener, remote_listener
from horovod_tune.channel.listener import ChannelToken
from horovod_tune.channel.relay import Relay
from horovod_tune.channel.remote_listener import RemoteListener, listen_for_hosts, relay_tokens
from horovod_tune.channel.report_channel import CoordinatorChannel, RankChannel
from horovod_tune.messages import CheckpointPlace, Report

WAIT_S = 20.0


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteListener]:
    monkeypatch.setattr(remote_listener, "ACCEPT_S", WAIT_S)
    house = listen_for_hosts("127.0.0.1")
    yield house
    house.close()


def listen(channel: RankChannel) -> queue.Queue[tuple[Any, ...]]:
    """Listen until the channel ends; one thread a channel, or they would take each other's releases."""
    heard: queue.Queue[tuple[Any, ...]] = queue.Queue()
    threading.Thread(target=channel.listen, args=(lambda *said: heard.put(said),), daemon=True).start()
    return heard


def test_each_rank_gets_what_is_sent_to_it(house: RemoteListener) -> None:
    ranks = {worker: RankChannel(house.create_token(worker)) for worker in (3, 70_000)}
    ends = {worker: CoordinatorChannel(end) for worker, end in house.accept(WAIT_S).items()}
    assert ends.keys() == ranks.keys()
    place = CheckpointPlace("/storage/c", None, "node", 4)
    assert ends[3].release(1, 4, place) and ends[70_000].release(2, 5, None)
    assert listen(ranks[3]).get(timeout=WAIT_S) == (1, 4, place)
    assert listen(ranks[70_000]).get(timeout=WAIT_S) == (2, 5, None)
    assert ends[3].released == (1, 4)
    for end in ends.values():
        end.close()
    assert not ends[3].release(1, 5, None) and ends[3].released == (1, 4)


def test_strangers_are_turned_away_and_hold_up_nobody(house: RemoteListener) -> None:
    token = house.create_token(1)
    source = random.Random(1)
    with contextlib.ExitStack() as stack:
        strangers = []
        wrong = bytes(4) + token.secret[4:], token.secret[:-1] + bytes([token.secret[-1] ^ 1])
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 3, token.secret[:20], source.randbytes(36), *wrong):
            strangers.append(stack.enter_context(socket.create_connection(token.address, timeout=WAIT_S)))
            strangers[-1].sendall(said)
        rank = RankChannel(token)
        ends = house.accept(WAIT_S)
        assert list(ends) == [1]
        for stranger in strangers:
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b"", "it is not let in, and not kept"
    channel = CoordinatorChannel(ends[1])
    assert channel.release(1, 1, None)
    assert listen(rank).get(timeout=WAIT_S) == (1, 1, None)
    channel.close()


def test_a_secret_is_good_for_one_connection(house: RemoteListener) -> None:
    token = house.create_token(1)
    house.create_token(2)  # is waited for, and never comes
    first, second = listener.connect(token), listener.connect(token)
    ends = house.accept(1.0)
    assert list(ends) == [1]
    with first, second, ends[1]:
        closed = [each for each in (first, second) if _is_closed(each)]
        assert len(closed) == 1


def _is_closed(end: socket.socket) -> bool:
    end.settimeout(0.2)
    try:
        return end.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_more_strangers_than_are_kept_do_not_keep_a_rank_out(
    house: RemoteListener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_listener, "MAX_STRANGERS", 4)
    token = house.create_token(1)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(token.address, timeout=WAIT_S))
        rank = stack.enter_context(listener.connect(token))
        ends = house.accept(WAIT_S)
        assert list(ends) == [1]
        ends[1].close()
        assert rank.recv(1) == b""


def test_the_port_is_closed_when_all_have_come(house: RemoteListener) -> None:
    token = house.create_token(1)
    with listener.connect(token):
        for end in house.accept(WAIT_S).values():
            end.close()
        with pytest.raises(ConnectionRefusedError):
            listener.connect(token)


def test_the_first_rank_of_a_host_hands_on_what_it_hears() -> None:
    tokens = relay_tokens([4, 5, 6])
    with ThreadPoolExecutor(3) as pool:
        connecting = [pool.submit(RankChannel, token) for token in tokens.values()]  # before it listens
        relay = Relay(tokens)
        neighbours = [each.result(timeout=WAIT_S) for each in connecting]
        relay._accepting.join(WAIT_S)
        relay.release(1, 7, None)
    heard = [listen(channel) for channel in neighbours]
    assert [each.get(timeout=WAIT_S) for each in heard] == [(1, 7, None)] * 3
    neighbours[0].close()
    relay.release(1, 8, None)  # one that is gone is no reason not to tell the others
    assert [each.get(timeout=WAIT_S) for each in heard[1:]] == [(1, 8, None)] * 2


def test_nobody_listening_is_an_error_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "CONNECT_S", 0.3)
    (token,) = relay_tokens([1]).values()
    with pytest.raises(ConnectionRefusedError):
        listener.connect(token)
    with pytest.raises(ConnectionRefusedError):
        listener.connect(ChannelToken(("127.0.0.1", 1), b"secret"))


def test_a_relay_that_closes_leaves_nothing_behind() -> None:
    """Also while it waits for a rank that never comes, as one that died on its way into the world."""
    tokens = relay_tokens([4, 5])
    relay = Relay(tokens)
    neighbour = RankChannel(tokens[4])
    heard = listen(neighbour)
    while not relay._channels:
        time.sleep(0.01)
    relay.release(1, 1, None)
    assert heard.get(timeout=WAIT_S) == (1, 1, None), "the one that is there waits for nobody"
    began = time.monotonic()
    relay.close()
    relay.close()
    assert time.monotonic() - began < WAIT_S / 4 and not relay._accepting.is_alive()
    assert neighbour._channel.receive(WAIT_S) == ([], False)
    with pytest.raises(ConnectionRefusedError):
        listener.connect(replace(tokens[5], by_rank=False))


def test_a_rank_sends_its_reports_to_the_coordinator_alone() -> None:
    tokens = relay_tokens([4])
    relay = Relay(tokens)
    assert not RankChannel(tokens[4]).report(1, Report(1, {}))
    relay.close()
