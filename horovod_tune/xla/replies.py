"""Runs in the host actor: collects the replies of several ranks to one request."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

Reply = TypeVar("Reply")


class Replies(Generic[Reply]):
    """Replies by rank. One thread puts them; another clears them, sends a request and waits."""

    def __init__(self) -> None:
        self._by_rank: dict[int, Reply] = {}
        self._changed = threading.Condition()

    def clear(self) -> None:
        """Forget the replies to the previous request."""
        with self._changed:
            self._by_rank = {}

    def put(self, rank: int, answer: Reply) -> None:
        with self._changed:
            self._by_rank[rank] = answer
            self._changed.notify_all()

    def wait_for(self, count: int, *, timeout_s: float) -> dict[int, Reply]:
        """Return the replies as soon as there are ``count``, or those that arrived within ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._by_rank) == count, timeout=timeout_s)
            return dict(self._by_rank)
