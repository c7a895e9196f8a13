"""Runs in the host actor: detects that ranks hang, and where; `inactivity.py` has the rules."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Generic, TypeVar

from horovod_tune.xla import inactivity
from horovod_tune.xla.inactivity import Inactivity, StackDump
from horovod_tune.xla.supervisor import Supervisor

Reply = TypeVar("Reply")

# How often the activity of ranks that send nothing is measured; a host has many processes.
CHECK_INTERVAL_S = 5.0
# How long inactive ranks may take to send their stacks.
STACKS_TIMEOUT_S = 5.0


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


class HangDetector:
    """Measures how long the ranks are inactive while the coordinator listens, and collects their stacks."""

    def __init__(self, supervisor: Supervisor, *, limit_s: float) -> None:
        self._supervisor = supervisor
        self._limit_s = limit_s
        self._inactivity = Inactivity(limit_s)
        self._listened_s = 0.0
        self._stacks: Replies[StackDump] = Replies()

    def restart(self) -> None:
        """Start counting again."""
        self._listened_s = 0.0
        self._inactivity.restart()

    def add_time(self, for_s: float) -> None:
        """Add ``for_s`` to the time that the coordinator has listened."""
        self._listened_s += for_s

    @property
    def is_due(self) -> bool:
        """True if it is time for a `check`."""
        return self._listened_s >= min(CHECK_INTERVAL_S, self._limit_s / 6)

    def check(self, running: Collection[int]) -> tuple[int, str] | None:
        """Return which of the ``running`` ranks hangs and the error's text; None if none does."""
        listened_s, self._listened_s = self._listened_s, 0.0
        if not self._inactivity.update(listened_s, self._supervisor.activity()):
            return None
        self._inactivity.restart()
        return inactivity.explain(self._collect_stacks(running), self._limit_s)

    def _collect_stacks(self, running: Collection[int]) -> dict[int, StackDump | None]:
        self._stacks.clear()
        for rank in self._supervisor.ranks:
            if rank.ordinal in running:
                rank.send("dump_stack")
        stacks = self._stacks.wait_for(len(running), timeout_s=STACKS_TIMEOUT_S)
        return {ordinal: stacks.get(ordinal) for ordinal in running}

    def add_stack(self, ordinal: int, stack: StackDump) -> None:
        """Add a rank's stack. Runs in the supervisor's thread."""
        self._stacks.put(ordinal, stack)
