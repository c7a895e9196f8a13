"""When an elastic trial forms its next world. Pure."""

from __future__ import annotations

from enum import Enum, auto


class Decision(Enum):
    """What to do with a world that is being left."""

    # Some ranks have not left it yet.
    WAIT_FOR_RANKS = auto()
    # All have, and are fewer than may go on: others are awaited.
    WAIT_FOR_WORKERS = auto()
    GIVE_UP_RANKS = auto()
    """Those that have not left it are lost too."""
    FORM = auto()
    FAIL = auto()


def decide(
    *,
    left: int,
    waiting: int,
    ready: int,
    min_workers: int,
    elapsed_s: float,
    wait_s: float,
    leave_s: float,
) -> Decision:
    """Return what to do ``elapsed_s`` seconds after a world began to be left.

    Args:
        left: how many workers are not lost.
        waiting: how many of those wait for their place in the next world.
        ready: how many others have started and wait to join.
        min_workers: the fewest workers that form a world.
        elapsed_s: seconds since the world began to be left.
        wait_s: how long too few workers wait for others.
        leave_s: how long the training function may take to leave the world. A rank that computes for longer
            without a collective is not waited for.

    >>> limits = dict(min_workers=2, elapsed_s=1.0, wait_s=60.0, leave_s=60.0)
    >>> decide(left=2, waiting=1, ready=0, **limits).name
    'WAIT_FOR_RANKS'
    >>> decide(left=2, waiting=2, ready=0, **limits).name
    'FORM'
    >>> decide(left=2, waiting=1, ready=0, **{**limits, "elapsed_s": 61.0}).name
    'GIVE_UP_RANKS'
    >>> decide(left=1, waiting=1, ready=0, **limits).name
    'WAIT_FOR_WORKERS'
    >>> decide(left=1, waiting=1, ready=1, **limits).name
    'FORM'
    """
    if waiting < left:
        return Decision.WAIT_FOR_RANKS if elapsed_s <= leave_s else Decision.GIVE_UP_RANKS
    if left + ready >= min_workers:
        return Decision.FORM
    return Decision.WAIT_FOR_WORKERS if elapsed_s <= wait_s else Decision.FAIL
