"""What several ranks answer to one question, waited for by whoever asked."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class Answers(Generic[Answer]):
    """Answers by rank. They come in one thread; another clears, asks and waits."""

    def __init__(self) -> None:
        self._by_rank: dict[int, Answer] = {}
        self._changed = threading.Condition()

    def clear(self) -> None:
        """Forget the answers to the question before."""
        with self._changed:
            self._by_rank = {}

    def put(self, rank: int, answer: Answer) -> None:
        with self._changed:
            self._by_rank[rank] = answer
            self._changed.notify_all()

    def wait_for(self, count: int, *, timeout_s: float) -> dict[int, Answer]:
        """Return the answers when there are ``count`` of them, or those that came within ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._by_rank) == count, timeout=timeout_s)
            return dict(self._by_rank)
