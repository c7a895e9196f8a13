"""Decides what happens to a trial whose ranks are lost, join or leave. Pure: no Ray, no clock, no processes.

`TrialState` passes its status to `decide`. A trial of fixed size fails on the first loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

# The longest time between two heartbeats of a worker (a quarter of timeout_s if that is shorter).
HEARTBEAT_S = 10.0
# How long a worker may take to reply when others wait for it (half of timeout_s if that is shorter).
PROMPT_REPLY_S = 5.0
# Interval between checks of a changing world, or of starting actors.
TICK_S = 0.1
# The trial fails if more than this many worlds in a row break before a report.
WORLDS_WITHOUT_REPORT = 20


@dataclass(frozen=True)
class Limits:
    """How long a trial waits, and how many workers it may have; without ``min_workers`` its size is fixed.

    Args:
        timeout_s: how long a heartbeat may be overdue, a phase of a start may take, and a training function
            may take to leave a broken world.
        wait_s: how long a trial with fewer than ``min_workers`` workers waits for more.
    """

    timeout_s: float
    min_workers: int | None = None
    max_workers: int = 0
    wait_s: float = 0.0

    @property
    def is_elastic(self) -> bool:
        return self.min_workers is not None

    @property
    def heartbeat_s(self) -> float:
        """How long a worker with nothing to send waits before it replies to a poll."""
        return min(HEARTBEAT_S, self.timeout_s / 4)

    @property
    def prompt_s(self) -> float:
        """How long a worker may take to reply while others wait for it."""
        return min(PROMPT_REPLY_S, self.timeout_s / 2)

    def can_continue_with(self, workers: int) -> bool:
        """Return True if ``workers`` workers may form a world after a loss."""
        return self.min_workers is not None and workers >= self.min_workers


@dataclass(frozen=True)
class WorldStatus:
    """The input of `decide`: the status of a world that is changing or has just lost a rank.

    Args:
        members: workers that are not lost.
        left: members that have left the world and wait for the next one.
        ready: workers that have started and wait to join.
        elapsed_s: since the world began to change.
        waited_s: since then, or since the last loss during the change.
        has_returned: True if the training function has returned on some rank.
        has_stalled: True if a rank left because of a collective that not all ranks entered.
        worlds_without_report: how many worlds in a row broke before a report.
    """

    members: int
    lost: int = 0
    left: int = 0
    ready: int = 0
    elapsed_s: float = 0.0
    waited_s: float = 0.0
    has_returned: bool = False
    has_stalled: bool = False
    worlds_without_report: int = 0


class Action(Enum):
    """What `decide` returns, unless the trial fails."""

    WAIT = auto()
    # Form the next world from the members and the workers that are ready to join.
    REFORM = auto()
    # Treat the members that have not left the world yet as lost.
    ABANDON = auto()


@dataclass(frozen=True)
class Fail:
    """Fail the trial; ``reason`` is why the other ranks cannot continue, if that is not obvious."""

    reason: str = ""


def decide(now: WorldStatus, limits: Limits) -> Action | Fail:
    """Return what to do about a world that has lost ranks, or whose members leave it for the next one.

    >>> fixed, elastic = Limits(60.0), Limits(60.0, min_workers=2, max_workers=3, wait_s=30.0)
    >>> decide(WorldStatus(members=2, lost=1), fixed)
    Fail(reason='')
    >>> decide(WorldStatus(members=2, lost=1, left=1), elastic)
    <Action.WAIT: 1>
    >>> decide(WorldStatus(members=2, lost=1, left=2), elastic)
    <Action.REFORM: 2>
    >>> decide(WorldStatus(members=2, left=1, has_returned=True), elastic)
    Fail(reason='')
    >>> decide(WorldStatus(members=2, lost=1, left=1, elapsed_s=61.0), elastic)
    <Action.ABANDON: 3>
    >>> decide(WorldStatus(members=1, lost=2, left=1, waited_s=31.0), elastic).reason[:21]
    '1 rank(s) are left, m'
    """
    if now.has_returned or (now.lost and (not limits.is_elastic or not now.members)):
        return Fail()  # a rank whose function has returned cannot form a world with the others
    if now.left < now.members:
        return Action.WAIT if now.elapsed_s <= limits.timeout_s else Action.ABANDON
    if now.has_stalled and not now.lost:
        return Fail()  # the ranks call different collectives, and would again in the next world
    if now.worlds_without_report > WORLDS_WITHOUT_REPORT:
        return Fail(f"More than {WORLDS_WITHOUT_REPORT} worlds in a row broke before a report.")
    if limits.can_continue_with(now.members + now.ready):
        return Action.REFORM
    if now.waited_s <= limits.wait_s:
        return Action.WAIT
    return Fail(
        f"{now.members} rank(s) are left, min_workers={limits.min_workers}, and too few replacements started "
        f"within min_workers_timeout_s={limits.wait_s:g} s"
    )


def backoff_s(attempts: int) -> float:
    """Return how long to wait before the next attempt, after ``attempts`` attempts.

    >>> [backoff_s(attempts) for attempts in (0, 1, 2, 20)]
    [0.5, 1.0, 2.0, 30.0]
    """
    return float(min(30.0, 0.5 * 2.0 ** min(attempts, 10)))
