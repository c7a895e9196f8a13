"""What a trial's state records of losses that `fake_workers` cannot time as exactly."""

from __future__ import annotations

import pytest

from horovod_tune.coordinator.policy import WORLDS_WITHOUT_REPORT, Limits
from horovod_tune.coordinator.trial_state import Do, Leaving, Member, TrialState
from horovod_tune.messages import FailureKind, NeedsWorld, Report, WorkerInfo


@pytest.fixture
def state() -> TrialState[Member]:
    """An elastic trial of two ranks that has not begun."""
    infos = [WorkerInfo(f"node {n}", "10.0.0.1", f"host{n}", 100 + n, 0.0) for n in range(2)]
    members = [Member(slot, info, ranks=(slot,)) for slot, info in enumerate(infos)]
    return TrialState(Leaving(Limits(60.0, min_workers=1, max_workers=2)), members)


def test_a_loss_before_the_trial_begins_is_only_recorded(state: TrialState[Member]) -> None:
    assert state.lose(state.members[1], FailureKind.DIED, "killed", now=1.0) == []
    assert [each.rank for each in state.failures] == [1] and len(state.members) == 2


@pytest.mark.parametrize("reports", [False, True])
def test_a_trial_fails_after_too_many_worlds_without_a_report(
    state: TrialState[Member], reports: bool
) -> None:
    state.begin(None)
    for world in range(WORLDS_WITHOUT_REPORT + 1):
        assert not state.failures, f"after {world} worlds"
        for member in list(state.members):
            state.receive(member, [NeedsWorld(member.ranks[0], "lost contact")], now=world)
        effects = state.tick(now=world, ready=[])
        if [each.do for each in effects] != [Do.FORM_WORLD]:
            break
        state.record_formed(state.members)
        if reports:
            state.receive(state.members[0], [Report(world + 1, {}, None)], now=world)
            assert state.take_report(now=world) is not None
    assert bool(state.failures) is not reports
    assert len(state.changes) == WORLDS_WITHOUT_REPORT + reports
