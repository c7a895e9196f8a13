"""When an elastic trial forms its next world: decided without Ray."""

from __future__ import annotations

import itertools

from horovod_tune.coordinator.reforming import Decision, decide


def test_every_case_ends() -> None:
    """However many are left, wait and join: after all limits the answer is to form the world or to fail."""
    for left, waiting, ready, least in itertools.product(range(1, 5), range(5), range(4), range(1, 5)):
        if waiting > left:
            continue
        late = decide(
            left=left, waiting=waiting, ready=ready, min_workers=least, elapsed_s=61, wait_s=60, leave_s=60
        )
        assert late in (Decision.FORM, Decision.FAIL if waiting == left else Decision.GIVE_UP_RANKS)


def test_a_world_is_formed_only_of_ranks_that_have_left_theirs_and_of_enough() -> None:
    for left, waiting, ready, least in itertools.product(range(1, 5), range(5), range(4), range(1, 5)):
        if waiting > left:
            continue
        now = decide(
            left=left, waiting=waiting, ready=ready, min_workers=least, elapsed_s=1, wait_s=60, leave_s=60
        )
        assert (now is Decision.FORM) == (waiting == left and left + ready >= least)
