"""What a training actor sends a rank, receives from it, and knows of its end; without a template."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from horovod_tune.actors import rank_output, rank_process
from horovod_tune.actors.rank_process import RankProcess
from horovod_tune.channel.framing import ACTOR_MESSAGES, Channel
from horovod_tune.channel.report_channel import Listener
from horovod_tune.errors import StartFailed
from horovod_tune.messages import CheckpointPlace


@pytest.fixture(autouse=True)
def nothing_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_output, "_print", lambda data, label: None)


class Started:
    """A process that a template has started, whose messages and output the test sends in its place."""

    def __init__(self) -> None:
        self.program = subprocess.Popen(["sleep", "600"], start_new_session=True)

    def start_rank(self, descriptors: list[int]) -> int:
        control, self.output, channel = map(os.dup, descriptors)
        self.control = Channel(socket.socket(fileno=control), ACTOR_MESSAGES)
        self.channel = socket.socket(fileno=channel)
        return self.program.pid

    def close(self) -> None:
        self.control.close()
        self.channel.close()
        os.close(self.output)
        self.program.kill()
        self.program.wait()


@pytest.fixture
def started() -> Iterator[Started]:
    made = Started()
    yield made
    made.close()


@pytest.fixture
def messages() -> list[tuple[str, bytes]]:
    """The kind of each message, and the output that was known when it arrived."""
    return []


@pytest.fixture
def rank(started: Started, messages: list[tuple[str, bytes]]) -> Iterator[RankProcess]:
    made = RankProcess(lambda message: messages.append((message["kind"], made.output.tail())))
    made.start(started)  # type: ignore[arg-type]
    yield made
    if not made.has_ended.is_set():
        made.end(None)


def test_nothing_stays_open_if_it_cannot_be_started() -> None:
    template = Mock()
    template.start_rank.side_effect = StartFailed("the template has ended")
    before = psutil.Process().num_fds()
    rank = RankProcess(lambda message: None)
    with pytest.raises(StartFailed):
        rank.start(template)
    assert psutil.Process().num_fds() == before
    assert rank.has_ended.is_set()


def replies(started: Started, count: int) -> list[tuple[Any, str]]:
    """Return what the rank receives for its requests, as the value and the error of each."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        new, is_open = started.control.receive(30.0)
        assert new and is_open
        found += new
    return [(each["value"], each["error"]) for each in sorted(found, key=lambda each: each["id"])]


def test_its_output_is_known_before_a_message_that_follows_it(
    rank: RankProcess, started: Started, messages: list[tuple[str, bytes]]
) -> None:
    os.write(started.output, b"last words")
    started.control.send("awaited", names={})
    assert rank.receive()
    assert messages == [("awaited", b"last words")]


def test_what_it_printed_before_it_ended_without_a_message_is_known(
    rank: RankProcess, started: Started
) -> None:
    os.write(started.output, b"last words")
    rank.end(-11)
    assert rank.exit_text().endswith("last words") and rank.output.take() == b"last words"


def test_what_it_sent_and_printed_before_its_end_is_known(
    rank: RankProcess, started: Started, messages: list[tuple[str, bytes]]
) -> None:
    for _ in range(3):
        started.control.send("awaited", names={})
    started.control.close()
    os.write(started.output, b"last words\n")
    rank.end(3)
    assert [kind for kind, _ in messages] == ["awaited"] * 3
    assert rank.exit_text().endswith("it exited with status 3\nits last output was\n  last words")
    assert [rank.control.fileno(), rank.channel.fileno()] == [-1, -1], "it is closed"
    assert not rank.output.is_open


def gives(rank: Any, *values: Any, last: Any = None) -> list[Any]:
    """Stands for a method of the rank."""
    raise NotImplementedError


def fails(rank: Any) -> None:
    """Stands for a method of the rank."""


def test_what_the_actor_asks_is_answered_or_raises(rank: RankProcess, started: Started) -> None:
    def answer() -> None:
        while True:
            asked, is_open = started.control.receive(None)
            for each in asked:
                error = "it failed there" if each["request"] == "fails" else ""
                value = [*each["arguments"], each["named"]]
                started.control.send("reply", id=each["id"], value=value, error=error)
            rank.receive()
            if not is_open:
                return

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    assert rank.ask(gives, 30.0, 1, "a", last=2) == [1, "a", {"last": 2}]
    with pytest.raises(RuntimeError, match="it failed there"):
        rank.ask(fails, 30.0)
    rank.end(0)
    thread.join(30.0)
    with pytest.raises(RuntimeError, match=f"process {rank.pid} has ended"):
        rank.ask(gives, 30.0)


def test_a_question_ends_with_the_process_or_its_time(rank: RankProcess, started: Started) -> None:
    with pytest.raises(TimeoutError):
        rank.ask(gives, 0.01)
    started.control.receive(30.0)
    asked: list[BaseException] = []

    def ask() -> None:
        try:
            rank.ask(gives, 60.0)
        except RuntimeError as error:
            asked.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert started.control.receive(30.0)[0], "it has asked"
    rank.end(-9)
    thread.join(30.0)
    assert [str(each) for each in asked] == [f"the rank's process {rank.pid} has ended"]


def test_what_the_rank_asks_is_answered_with_a_value_or_the_error(
    rank: RankProcess, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask_node(place: CheckpointPlace, target: str | None) -> tuple[int, int]:
        if target is not None:
            raise ValueError(f"{place.node_id} has no {place.path}")
        return 1, 2

    monkeypatch.setattr(rank_process, "ask_node", ask_node)
    os.write(started.output, b"[stall_inspector.cc] One rank is missing\n")
    started.control.send("stall_report", id=1)
    started.control.send("fetch", id=2, path="/a", node_id="node", target=None)
    started.control.send("fetch", id=3, path="/a", node_id="node", target="/b")
    assert rank.receive()
    assert replies(started, 3) == [
        ("[stall_inspector.cc] One rank is missing", ""),
        ((1, 2), ""),
        (None, "ValueError: node has no /a"),
    ]
    assert rank.unanswered == set()


def test_a_malformed_message_ends_the_process(rank: RankProcess, started: Started) -> None:
    started.control.send("report", run=1)
    assert not rank.receive()
    assert started.program.wait(30) == -signal.SIGKILL
    assert f"process {rank.pid}: it sent a malformed message: " in rank.exit_text()


def test_the_first_reason_for_which_it_was_killed_is_the_one_in_the_error(rank: RankProcess) -> None:
    rank.kill("the first reason")
    rank.kill("another one")
    rank.end(-9)
    assert rank.exit_text() == f"process {rank.pid}: the first reason"


def test_the_coordinator_gets_the_other_end_of_the_ranks_channel(rank: RankProcess, started: Started) -> None:
    listener = Listener()
    rank.hand_over_channel(listener.create_token(0))
    (channel,) = listener.accept().values()
    assert channel.acknowledge(1, 2, None)
    assert started.channel.recv(4096)
    channel.close()
    assert started.channel.recv(4096) == b"", "this process has no copy"


def test_reports_go_through_ray_where_no_coordinator_listens(
    rank: RankProcess, started: Started, caplog: pytest.LogCaptureFixture
) -> None:
    listener = Listener()
    token = listener.create_token(0)
    listener.accept()
    rank.hand_over_channel(token)
    assert "reports go through Ray: the coordinator cannot be reached: " in caplog.text
    assert started.channel.recv(4096) == b"", "the rank sees that its channel is closed"
