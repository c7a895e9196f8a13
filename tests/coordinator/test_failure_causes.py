"""Which of several lost ranks is the cause. Pure."""

from __future__ import annotations

from horovod_tune.coordinator import failures
from horovod_tune.messages import Failed, FailureKind


def test_the_rank_that_died_is_the_cause_and_not_those_that_lost_it():
    lost = [Failed(r, "a", FailureKind.DISCONNECTED, "HorovodInternalError") for r in (0, 2)]
    died = Failed(1, "b", FailureKind.DIED, "process 7: SIGKILL")
    assert failures.needs_cause(lost)
    assert not failures.needs_cause([*lost, died])
    text = failures.explain([*lost, died], world_size=3)
    assert text.splitlines() == [
        "rank 1 of 3 on b died:",
        "(rank 0 on a lost contact with the others; rank 2 on a lost contact with the others)",
        "process 7: SIGKILL",
    ]


def test_who_went_with_the_cause_is_named_up_to_a_number():
    lost = [Failed(r, "a", FailureKind.DISCONNECTED, "HorovodInternalError") for r in range(511)]
    text = failures.explain([*lost, Failed(511, "b", FailureKind.DIED, "gone")], world_size=512)
    assert "508 more ranks went with them" in text and len(text) < 500


def test_a_text_that_is_not_unicode_is_escaped():
    text = failures.explain([Failed(0, "a", FailureKind.DIED, "no file caf\udce9")], world_size=1)
    assert text.endswith(r"no file caf\udce9") and text.encode()


def test_an_own_exception_comes_before_a_death():
    raised = Failed(3, "a", FailureKind.RAISED, "ValueError: x")
    died = Failed(0, "b", FailureKind.DIED, "gone")
    assert failures.explain([died, raised], world_size=4).startswith("rank 3 of 4 on a failed:")
