"""Follows a job from this machine: its output, through any number of lost connections, until it is over."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from horovod_tune.launch.console import say
from horovod_tune.launch.head_shell import Unreachable
from horovod_tune.launch.values import LaunchError

LONGEST_WAIT_S = 15.0
# While the head stays away, it is said so again after so many attempts.
LOSSES_TOLD = 20
# How many times in a row the head's program may fail before that is an error: Ray may be busy.
REFUSALS = 10


@dataclass
class Follower:
    """What has been seen of a job so far."""

    offset: int = 0
    # Attempts in a row that brought nothing.
    lost: int = 0
    refused: int = 0
    ended: dict[str, Any] | None = None

    def take(self, message: dict[str, Any]) -> str:
        """Take a message of the head; return what is to be shown of it.

        >>> seen = Follower(offset=5)
        >>> seen.take({"log": "loss 0.1", "offset": 13}), seen.offset
        ('loss 0.1', 13)
        """
        self.lost = self.refused = 0
        if "ended" in message:
            self.ended = message["ended"]
        if "log" in message:
            self.offset = message["offset"]
            return str(message["log"])
        return ""

    def wait_s(self, share: float = 1.0) -> float:
        """Return how long to wait before the next attempt: 1, 2, 4 … seconds, 15 at most.

        >>> [Follower(lost=n).wait_s() for n in (1, 2, 3, 9)]
        [1.0, 2.0, 4.0, 15.0]
        """
        return min(LONGEST_WAIT_S, 2.0 ** (self.lost - 1)) * share


def follow(
    connect: Callable[[int], Iterable[dict[str, Any]]],
    *,
    offset: int = 0,
    note: Callable[[int], None] = lambda offset: None,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Show a job's output until it is over, and return its state.

    Args:
        connect: gives the head's messages from an offset of the output on.
        offset: what has been shown before, in bytes.
        note: called with each new offset.
        sleep: waits between two attempts.

    Raises:
        LaunchError: the head can be reached, and says several times in a row that it cannot tell.
    """
    seen = Follower(offset)
    while True:
        try:
            for text in _texts(seen, connect(seen.offset)):
                if text:
                    sys.stdout.write(text)
                    sys.stdout.flush()
                    note(seen.offset)
                if seen.ended is not None:
                    return seen.ended
            why = "the connection ended"
        except Unreachable as lost:
            why = str(lost)
        except LaunchError as error:
            seen.refused += 1
            if seen.refused >= REFUSALS:
                raise
            why = str(error)
        seen.lost += 1
        if seen.lost == 1 or seen.lost % LOSSES_TOLD == 0:
            say(f"[reconnecting… {why}]")
        sleep(seen.wait_s(random.uniform(0.7, 1.0)))


def _texts(seen: Follower, messages: Iterable[dict[str, Any]]) -> Iterator[str]:
    for message in messages:
        back = seen.lost
        text = seen.take(message)
        if back:
            say("[connected again]")
        yield text
