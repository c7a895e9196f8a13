"""Where the coordinator's one thread waits for whatever comes first: an answer through Ray or a report."""

from __future__ import annotations

import itertools
import queue
import selectors
import socket
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from horovod_tune.channel.report_channel import CoordinatorChannel
from horovod_tune.messages import Report


@dataclass
class Mail:
    """What has come: answers by the number that `expect` gave, reports with the number of their trial."""

    answers: list[tuple[int, Future[Any]]] = field(default_factory=list)
    reports: list[tuple[int, Report]] = field(default_factory=list)


class Inbox:
    """Answers to calls of actors, and what comes through channels; `wait` is for one thread."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._answers: queue.SimpleQueue[tuple[int, Future[Any]]] = queue.SimpleQueue()
        # Ray's thread rings when an answer has come, so that one `select` waits for answers and channels.
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)

    def expect(self, ref: Any) -> int:
        """Deliver the answer to ``ref`` here; return the number under which it will arrive."""
        number = next(self._numbers)

        def arrived(answer: Future[Any]) -> None:
            self._answers.put((number, answer))
            try:
                self._ringer.send(b"!")
            except OSError:  # it is ringing already, or this inbox is closed
                return

        ref.future().add_done_callback(arrived)
        return number

    def add_channels(self, channels: Iterable[CoordinatorChannel]) -> None:
        for channel in channels:
            self._selector.register(channel, selectors.EVENT_READ, channel)

    def wait(self, timeout_s: float) -> Mail:
        """Return what has come, as soon as something has, after ``timeout_s`` at the latest.

        Raises:
            MalformedMessage: a rank sent something other than a report.
        """
        mail = Mail()
        for key, _ in self._selector.select(timeout_s):
            channel = key.data
            if channel is None:
                self._take_answers(mail)
                continue
            mail.reports += channel.receive()
            if not channel.is_open:
                self._selector.unregister(channel)
        return mail

    def _take_answers(self, mail: Mail) -> None:
        self._bell.recv(4096)
        while True:
            try:
                mail.answers.append(self._answers.get_nowait())
            except queue.Empty:
                return

    def close_channel(self, channel: CoordinatorChannel | None) -> None:
        """Close one channel, if it is still open."""
        if channel is not None and channel.is_open:
            self._selector.unregister(channel)
            channel.close()

    def close_channels(self) -> None:
        """Close every open channel; answers continue to arrive."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                self._selector.unregister(key.fileobj)
                key.data.close()
