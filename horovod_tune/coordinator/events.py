"""The coordinator's event queue: workers' replies to polls, and reports through channels."""

from __future__ import annotations

import queue
import selectors
import socket
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from horovod_tune.channel.packing import MalformedMessage
from horovod_tune.errors import TrainingFailed
from horovod_tune.messages import Report

if TYPE_CHECKING:
    from horovod_tune.coordinator.workers import Worker

# A reply with its worker; a report with its trial's `TrialRequest.run`.
Replies = list[tuple[Any, Future[Any]]]
Reports = list[tuple[int, Report]]


class EventQueue:
    """Queue of workers' replies and of reports through channels; only one thread may `wait`."""

    def __init__(self) -> None:
        self._replies: queue.SimpleQueue[tuple[Any, Future[Any]]] = queue.SimpleQueue()
        # Ray's thread writes here when a reply arrives, so that one `select` waits for replies and channels.
        self._wakeup_r, self._wakeup_w = socket.socketpair()
        self._wakeup_r.setblocking(False)
        self._wakeup_w.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup_r, selectors.EVENT_READ)

    def expect(self, ref: Any, worker: Any) -> None:
        """Add the result of ``ref`` to the queue when it arrives, as a reply of ``worker``."""

        def arrived(reply: Future[Any]) -> None:
            self._replies.put((worker, reply))
            try:
                self._wakeup_w.send(b"!")
            except OSError:  # its buffer is full, so `wait` wakes up anyway, or this queue is gone
                return

        ref.future().add_done_callback(arrived)

    def add_channel(self, worker: Worker) -> None:
        """Receive reports through the worker's channel."""
        assert worker.channel is not None
        self._selector.register(worker.channel, selectors.EVENT_READ, worker)

    def wait(self, timeout_s: float) -> tuple[Replies, Reports]:
        """Wait until something arrives, for at most ``timeout_s``, and return everything that has arrived.

        Raises:
            TrainingFailed: a rank sent something other than a report through its channel.
        """
        replies: Replies = []
        reports: Reports = []
        for key, _ in self._selector.select(timeout_s):
            worker = key.data
            if worker is None:
                self._wakeup_r.recv(4096)
                while not self._replies.empty():  # only this thread takes from it
                    replies.append(self._replies.get_nowait())
                continue
            try:
                reports += worker.channel.receive()
            except MalformedMessage as error:
                raise TrainingFailed(f"received a malformed message from {worker.name}: {error}") from error
            if not worker.channel.is_open:
                self._selector.unregister(key.fileobj)
        return replies, reports

    def close_channels(self, workers: Sequence[Worker]) -> None:
        """Close the workers' open channels; replies continue to arrive."""
        for worker in workers:
            if worker.channel is not None and worker.channel.is_open:
                self._selector.unregister(worker.channel)
                worker.channel.close()
