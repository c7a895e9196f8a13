"""What a worker has to say until it is asked."""

from __future__ import annotations

import queue

from horovod_tune.messages import Message


class Outbox:
    """Messages of a worker's threads, in their order. Any thread may `put`; one at a time takes."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def put(self, message: Message) -> None:
        self._messages.put(message)

    def take(self, wait_s: float) -> list[Message]:
        """Return what there is, as soon as there is something; nothing after ``wait_s``."""
        messages: list[Message] = []
        try:
            messages.append(self._messages.get(timeout=wait_s))
            while True:
                messages.append(self._messages.get_nowait())
        except queue.Empty:
            return messages
