"""Runs in each worker: the queue of messages for the next poll."""

from __future__ import annotations

import queue

from horovod_tune.messages import Message


class Outbox:
    """Messages of a worker's threads, in order. Any thread may `put`; one thread at a time may `take`."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def put(self, message: Message) -> None:
        self._messages.put(message)

    def take(self, wait_s: float) -> list[Message]:
        """Return all messages as soon as there is one; an empty list after ``wait_s``."""
        messages: list[Message] = []
        try:
            messages.append(self._messages.get(timeout=wait_s))
            while True:
                messages.append(self._messages.get_nowait())
        except queue.Empty:
            return messages
