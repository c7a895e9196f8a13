"""How a trial continues when ranks are lost, and which of them is the cause. Pure: no Ray, no clock."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from horovod_tune.coordinator import failures
from horovod_tune.coordinator.policy import Action, Fail, Limits, WorldStatus, decide
from horovod_tune.messages import Failed, FailureKind


def changes(elapsed_s: float) -> Iterator[tuple[WorldStatus, Limits]]:
    """All small worlds that have been changing for ``elapsed_s``, and limits for them."""
    for members, left, ready, min_workers, lost in itertools.product(
        range(1, 5), range(5), range(4), range(1, 5), range(3)
    ):
        if left <= members:
            limits = Limits(60.0, min_workers=min_workers, max_workers=8, wait_s=60.0)
            now = WorldStatus(members, lost, left=left, ready=ready, elapsed_s=elapsed_s, waited_s=elapsed_s)
            yield now, limits


def test_every_change_ends() -> None:
    """After all time limits a world is formed, ranks that have not left are lost, or the trial fails."""
    for now, limits in changes(elapsed_s=61.0):
        action = decide(now, limits)
        enough = now.members + now.ready >= (limits.min_workers or 0)
        if now.left < now.members:
            assert action is Action.ABANDON, (now, limits, action)
        else:
            assert action is Action.REFORM if enough else isinstance(action, Fail), (now, limits, action)


def test_a_world_is_formed_when_all_members_have_left_the_last_one_and_are_enough() -> None:
    for now, limits in changes(elapsed_s=1.0):
        action = decide(now, limits)
        ready = now.left == now.members and now.members + now.ready >= (limits.min_workers or 0)
        assert action is (Action.REFORM if ready else Action.WAIT), (now, limits, action)


def test_only_the_first_lost_ranks_are_named():
    lost = [Failed(r, "a", FailureKind.DISCONNECTED, "HorovodInternalError") for r in range(511)]
    text = failures.explain([*lost, Failed(511, "b", FailureKind.DIED, "gone")], world_size=512)
    assert "508 more ranks were lost" in text and len(text) < 500
