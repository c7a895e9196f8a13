"""A backend of worlds with one rank, which needs no library: it prints each of its calls."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from horovod_tune.actors.rank_backend import RankBackend
from horovod_tune.messages import FailureKind, RankInfo
from horovod_tune.session.committed_state import States
from horovod_tune.session.session import WorldBroken


def say(*words: object) -> None:
    """Print a line at once, since the rank's threads may print at the same time."""
    os.write(1, " ".join(map(str, words)).encode() + b"\n")


class Stalled(Exception):
    """The error of a rank that waited for rank 1 in a collective."""


class OneRank:
    """The collectives of `commit`."""

    init_call = "init()"

    def are_ready(self) -> bool:
        return True

    def any(self, flag: bool) -> bool:
        return flag

    def gather(self, number: int) -> list[int]:
        return [number]


class PrintingStates(States):
    def offer_change(self) -> None:
        say("offer_change")


class BackendOfOne(RankBackend):
    def __init__(self) -> None:
        self.collectives: Any = OneRank()
        self.states = PrintingStates()
        self.was_closed = threading.Event()

    def load(self) -> None:
        sys.backend = self  # type: ignore[attr-defined] # for training functions

    def enter(self, rank_info: RankInfo, name: str) -> None:
        say("enter", rank_info.rank, name)

    def leave(self) -> None:
        say("leave")

    def end(self, *, has_returned: bool) -> None:
        say("end", has_returned)

    def close(self) -> None:
        say("close")
        self.was_closed.set()

    def abort(self) -> None:
        say("abort")

    def describe_failure(
        self, error: BaseException, stall_report: Callable[[], str]
    ) -> tuple[FailureKind, str, dict[int, str]]:
        if isinstance(error, Stalled):
            return FailureKind.STALLED, f"The report: {stall_report()}", {1: "loss"}
        return FailureKind.DISCONNECTED if isinstance(error, WorldBroken) else FailureKind.RAISED, "", {}

    def answers(self) -> Sequence[Callable[..., Any]]:
        return (self.serve_store,)

    def serve_store(self, host: str) -> int:
        return len(host)
