"""One open question to each member: what it has to say. Whoever leaves it open for too long is silent."""

from __future__ import annotations

import time
from typing import Any

from horovod_tune.workers.mailbox import Mailbox
from horovod_tune.workers.members import Members

POLL_S = 10.0
"""The longest time between two signs of life of a member (a quarter of timeout_s where that is shorter)."""


class Polls:
    """The calls of `poll` that members have still to answer, by the number under which the answer comes."""

    def __init__(self, members: Members, mailbox: Mailbox, *, timeout_s: float) -> None:
        self._members, self._mailbox = members, mailbox
        self._timeout_s = timeout_s
        self.every_s = min(POLL_S, timeout_s / 4)
        self._open: dict[int, int] = {}
        self._asked_at: dict[int, float] = {}

    def forget(self) -> None:
        """Wait for none of the answers any more."""
        self._open = {}

    @property
    def asked(self) -> set[int]:
        """The members that have one to answer."""
        return set(self._open.values())

    def ask(self, member: int, *proceed: Any) -> None:
        """Ask a member for its messages; ``proceed`` goes with the question."""
        ref = self._members.actors[member].poll.remote(self.every_s, *proceed)
        self._open[self._mailbox.expect(ref)] = member
        self._asked_at[member] = time.monotonic()

    def answered(self, number: int) -> int | None:
        """Return whose answer has come under ``number``; None for one that nobody waits for any more."""
        return self._open.pop(number, None)

    def give_up_silent(self, listening_since: float) -> list[int]:
        """Return the members that have said nothing for ``timeout_s``, and wait for them no more.

        Args:
            listening_since: by the monotonic clock. Time in which nobody listened (Tune was deciding) does
                not count.
        """
        now = time.monotonic()
        silent = {}
        for number, member in self._open.items():
            since = max(self._asked_at[member] + self.every_s, listening_since)
            if now - since > self._timeout_s:
                silent[number] = member
        for number in silent:
            del self._open[number]
        return list(silent.values())
