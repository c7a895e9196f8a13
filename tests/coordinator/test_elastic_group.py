"""An elastic group over workers that do as a test says: how its world shrinks, grows and gives up."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from fake_workers import ORDER, TIMEOUT_S, WAIT_S, Elastic, ElasticActor, failed
from ray.exceptions import ActorDiedError

from horovod_tune.coordinator.policy import WORLDS_WITHOUT_REPORT
from horovod_tune.errors import StartFailed, TrainingFailed
from horovod_tune.messages import FailureKind, Finished, NeedsWorld, Report


@pytest.fixture
def make(make_elastic: Callable[..., Elastic]) -> Callable[..., Elastic]:
    return make_elastic


def test_the_others_go_on_and_say_why_the_world_changed(make: Callable[..., Elastic]) -> None:
    trial = make(3, least=2, most=3, is_full=True)
    assert trial.next_report().metrics == {"size": 3}
    trial.world[1].die()
    assert trial.next_report().metrics == {"size": 2}
    assert trial.group.world.changes == ["rank 1 on host1 died"]
    assert trial.launcher.abandoned, "nobody waits for it on the way into that world"
    assert [actor.rank for actor in trial.world] == [0, 1], "counted anew"


def test_a_report_that_is_sent_again_across_a_world_change_is_taken_once(
    make: Callable[..., Elastic],
) -> None:
    """Its connection was lost with the world, and rank 0 does not know whether it came."""
    trial = make(2, least=1, most=2, is_full=True)
    report = trial.next_report()
    first, other = trial.world
    first.say(report)  # on its way when the world is left, and so in front of what the rank says then
    other.die()
    first.leave()
    trial.clock.at(5.0, lambda: first.say(report))  # and again in the next world
    trial.clock.at(6.0, lambda: first.say(Report(2, {"size": 1})))
    assert trial.group.next_event() == Report(2, {"size": 1})
    assert len(trial.group.world.changes) == 1
    assert [call[2] for call in first.called("rejoin")] == [1], "the next world counts it once"


def test_a_world_never_has_more_ranks_than_it_may(make: Callable[..., Elastic]) -> None:
    trial = make(1, least=1, most=3)
    rng = random.Random(1)
    for _ in range(20):
        assert trial.next_report().metrics == {"size": 3}
        rng.choice(trial.world).die()
    assert len(trial.launcher.everybody) == 3 + 19, "the last was not missed"


def test_a_rank_that_hangs_while_others_wait_in_a_collective_is_left_behind(
    make: Callable[..., Elastic],
) -> None:
    trial = make(3, least=2, most=3, is_full=True)
    assert trial.next_report().metrics == {"size": 3}
    first, hung, _ = trial.world
    del hung.replies["break_world"]  # it is alive, and leaves no world
    first.has_left = True
    first.say(NeedsWorld(0, "HorovodInternalError", "Missing ranks: 1"))
    trial.clock.at(TIMEOUT_S + 10.0, lambda: first.say(Report(2, {"size": 2})))
    assert trial.group.next_event() == Report(2, {"size": 2})
    assert trial.group.world.changes == ["rank 1 on host1 hung"]
    assert hung.called("killed")


def test_a_collective_that_not_all_enter_fails_where_no_rank_hangs(make: Callable[..., Elastic]) -> None:
    trial = make(2, least=1, most=2)
    first = trial.world[0]
    first.has_left = True
    first.say(NeedsWorld(0, "HorovodInternalError", "Missing ranks: 1"))
    with pytest.raises(TrainingFailed) as raised:
        trial.group.next_event()
    assert "rank 0 of 2 on host0 waited in a collective that not all ranks entered" in str(raised.value)
    assert "Missing ranks: 1" in str(raised.value)


def test_when_all_ranks_die_at_once_the_trial_fails(make: Callable[..., Elastic]) -> None:
    trial = make(3, least=1, most=3, is_full=True)
    for actor in trial.world:
        actor.die()
    with pytest.raises(TrainingFailed, match="rank 0 of 3 on host0 died"):
        trial.group.next_event()


def test_a_function_that_cannot_be_called_again_fails_with_the_rank_that_was_lost(
    make: Callable[..., Elastic],
) -> None:
    """It has reported and committed nothing, so its ranks end with the loss of their world."""
    trial = make(3, least=2, most=3, is_full=True)
    assert trial.next_report().metrics == {"size": 3}
    trial.world[1].die()
    for actor in (trial.world[0], trial.world[2]):
        actor.say(failed(actor.rank, FailureKind.DISCONNECTED, "connection closed"))
    with pytest.raises(TrainingFailed, match="rank 1 of 3 on host1 died"):
        trial.group.next_event()


def test_a_scheduler_changes_the_size_of_a_trial_that_runs(make: Callable[..., Elastic]) -> None:
    trial = make(2, least=1, most=2)
    first = list(trial.world)
    assert trial.group.world.resize(4, b"four")
    assert trial.next_report().metrics == {"size": 4}
    assert trial.world[:2] == first, "those that stay keep their processes"
    assert trial.group.world.resize(3, b"three")
    assert trial.next_report().metrics == {"size": 3}
    assert trial.group.world.changes == ["more workers join", "a scheduler reduced the trial to 3 rank(s)"]
    assert trial.launcher.released == [3]
    assert [call[3] for call in first[0].called("rejoin")] == [b"four", b"three"]


def test_one_that_joins_no_more_ends_and_gives_back_its_room(make: Callable[..., Elastic]) -> None:
    trial = make(2, least=1, most=2, is_full=True)
    assert trial.group.world.resize(4, b"")
    assert trial.group.world.resize(3, b"")
    assert trial.launcher.everybody[3].called("killed") and trial.launcher.released == [3]
    assert not trial.launcher.everybody[2].called("killed")
    assert trial.next_report().metrics == {"size": 2}


def test_one_that_is_lost_when_it_was_to_leave_is_not_replaced(make: Callable[..., Elastic]) -> None:
    trial = make(2, least=1, most=2)
    trial.group.world.resize(3, b"")
    assert trial.next_report().metrics == {"size": 3}
    del trial.world[2].replies["offer_change"]  # it has not come to its commit
    trial.group.world.resize(2, b"")
    trial.world[2].die()
    assert trial.next_report().metrics == {"size": 2}
    assert len(trial.launcher.everybody) == 3 and trial.launcher.released == [2]


@pytest.mark.parametrize("why", ["below its placement group", "nothing committed", "over"])
def test_a_size_that_takes_a_new_start_is_refused(make: Callable[..., Elastic], why: str) -> None:
    trial = make(2, least=1, most=2)
    trial.next_report()
    if why == "nothing committed":
        trial.world[0].replies["can_restore"] = False
    if why == "over":
        for actor in trial.world:
            actor.say(Finished(actor.rank))
        assert isinstance(trial.group.next_event(), Finished)
    assert not trial.group.world.resize(1 if why == "below its placement group" else 4, b"")
    assert trial.group.world.changes == [] and len(trial.launcher.everybody) == 2


def test_too_few_wait_for_others_as_long_as_they_may(make: Callable[..., Elastic]) -> None:
    trial = make(2, least=2, most=2, is_full=True)
    trial.next_report()
    began = trial.clock.now
    trial.world[1].die()
    with pytest.raises(
        TrainingFailed, match=r"(?s)rank 1 of 2 on host1 died.*1 rank\(s\) are left.*=30 s"
    ) as raised:
        trial.group.next_event()
    assert WAIT_S <= trial.clock.now - began <= WAIT_S + 10
    assert raised.value.lost_nodes == ("node 1",)


def test_one_that_comes_while_too_few_wait_lets_them_go_on(make: Callable[..., Elastic]) -> None:
    trial = make(2, least=2, most=2, is_full=True)
    trial.world[1].die()

    def make_room() -> None:
        trial.launcher.is_full = False
        trial.launcher.everybody[-1].die()  # that never came; its place is taken by another

    trial.clock.at(WAIT_S / 2, make_room)
    trial.clock.at(WAIT_S / 2 + 5, lambda: trial.report_in(0))
    assert trial.group.next_event() == Report(1, {"size": 2})


def test_worlds_that_break_again_and_again_without_a_report_end_the_trial(
    make: Callable[..., Elastic],
) -> None:
    trial = make(2, least=1, most=2)

    def break_it() -> None:
        trial.world[-1].die()
        trial.clock.at(1.0, break_it)

    trial.clock.at(1.0, break_it)
    said = f"{WORLDS_WITHOUT_REPORT} worlds in a row broke before anything was reported"
    with pytest.raises(TrainingFailed, match=said):
        trial.group.next_event()


def test_a_rank_that_does_not_leave_its_broken_world_is_lost_too(make: Callable[..., Elastic]) -> None:
    trial = make(3, least=1, most=3, is_full=True)
    del trial.world[2].replies["break_world"]
    trial.world[1].die()
    began = trial.clock.now
    trial.clock.at(TIMEOUT_S + 10, lambda: trial.report_in(0))
    assert trial.group.next_event() == Report(1, {"size": 1})
    assert trial.clock.now - began <= TIMEOUT_S + 10
    (change,) = trial.group.world.changes
    assert change == "rank 1 on host1 died; rank 2 on host2 hung"


def test_one_that_is_silent_while_the_others_wait_costs_them_seconds(make: Callable[..., Elastic]) -> None:
    trial = make(3, least=1, most=3, is_full=True)
    trial.world[2].fall_silent()
    trial.world[1].die()
    trial.report_in(8.0)
    assert trial.group.next_event() == Report(1, {"size": 1})
    (change,) = trial.group.world.changes
    assert change == "rank 1 on host1 died; rank 2 on host2 stopped responding"


def test_ranks_that_did_not_hear_that_others_wait_are_told_again(make: Callable[..., Elastic]) -> None:
    """Those of `hvd.elastic.run` forget what they are told while they enter a world."""
    trial = make(2, least=1, most=2)
    first, told = list(trial.world), 0

    def forget_twice() -> None:
        nonlocal told
        told += 1
        if told > 2:
            first[0].leave()

    first[0].replies["offer_change"] = forget_twice
    first[1].replies["offer_change"] = None
    assert trial.group.world.resize(3, b"")
    while trial.next_report().metrics != {"size": 3}:
        assert told < 3
    assert first[0].called("offer_change") == [(0,)] * 3
    assert trial.group.world.changes == ["more workers join"]


def dies_in(*calls: str, which: int = 1) -> Callable[[list[ElasticActor]], None]:
    """Let one of the actors die of its next call of a name, one after the other."""

    def plan(actors: list[ElasticActor]) -> None:
        for number, name in enumerate(calls):
            actor = actors[which + number]

            def answer(actor: ElasticActor = actor) -> None:
                actor.die()
                raise ActorDiedError

            actor.replies[name] = answer

    return plan


PHASES_OF_A_START = ["describe", "assign", "begin"]


@pytest.mark.parametrize("call", PHASES_OF_A_START)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_rank_that_dies_while_the_trial_starts_leaves_a_smaller_world(
    make: Callable[..., Elastic], call: str, which: int
) -> None:
    trial = make(3, least=2, most=3, is_full=True, before=dies_in(call, which=which))
    assert trial.next_report().metrics == {"size": 2}
    assert len(trial.launcher.everybody) == 4, "another starts in its place"


@pytest.mark.parametrize("call", PHASES_OF_A_START)
def test_a_start_that_leaves_too_few_ranks_fails_with_those_who_died(
    make: Callable[..., Elastic], call: str
) -> None:
    try:
        trial = make(3, least=3, most=3, is_full=True, before=dies_in(call))
    except StartFailed as error:
        assert call != "begin" and "died when asked" in str(error)
        return
    with pytest.raises(TrainingFailed, match=r"(?s)rank 1 of 3 on host1 died.*2 rank\(s\) are left"):
        trial.group.next_event()


def test_several_that_die_in_different_phases_of_a_start_leave_the_others(
    make: Callable[..., Elastic],
) -> None:
    trial = make(5, least=2, most=5, is_full=True, before=dies_in("describe", "assign", "begin"))
    assert trial.next_report().metrics == {"size": 2}


def test_one_that_does_not_start_in_time_is_replaced(make: Callable[..., Elastic]) -> None:
    trial = make(3, least=2, most=3, is_full=True, before=lambda actors: actors[1].fall_silent())
    assert trial.next_report().metrics == {"size": 2}
    assert trial.launcher.everybody[1].called("killed")


def test_a_kept_rank_that_has_died_before_the_next_trial_is_replaced(make: Callable[..., Elastic]) -> None:
    trial = make(3, least=2, most=3)
    for actor in trial.world:
        actor.say(Finished(actor.rank))
    assert isinstance(trial.group.next_event(), Finished)
    assert trial.group.end_trial() == []
    trial.world[1].die()
    trial.group.begin(replace(ORDER, function=None))
    assert trial.next_report().metrics == {"size": 3}
    (request,) = trial.launcher.everybody[-1].called("begin")[0]
    assert request.function == b"train", "the one that joins has never had it"


@pytest.mark.parametrize("call", ["load", "assign", "begin"])
def test_one_that_dies_while_it_joins_is_replaced(make: Callable[..., Elastic], call: str) -> None:
    trial = make(3, least=1, most=3, is_full=True)
    trial.launcher.next_one = dies_in(call, which=0)
    trial.launcher.is_full = False
    trial.world[1].die()
    while trial.next_report().metrics != {"size": 3}:
        assert trial.reports < 20
    assert len(trial.launcher.everybody) == 5, "the one that died, and another"


def test_one_that_dies_when_it_is_about_to_join_is_replaced(make: Callable[..., Elastic]) -> None:
    trial = make(3, least=1, most=3)
    assign = trial.launcher.assign

    def one_dies_first(workers: Sequence[Any], facts: Any, **options: Any) -> Any:
        trial.launcher.assign = assign
        workers[-1].die()
        return assign(workers, facts, **options)

    trial.launcher.assign = one_dies_first
    trial.world[1].die()
    while trial.next_report().metrics != {"size": 3}:
        assert trial.reports < 20


def test_a_slot_whose_actors_die_at_their_start_is_not_tried_without_end(
    make: Callable[..., Elastic],
) -> None:
    trial = make(2, least=1, most=2)
    trial.launcher.next_one = dies_in("load", which=0)
    trial.launcher.again = True
    trial.world[1].die()
    for _ in range(10):
        assert trial.next_report().metrics == {"size": 1}
    assert 3 < len(trial.launcher.everybody) < 15, "in 200 s"


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_lost_the_trial_goes_on_or_fails_in_time(make: Callable[..., Elastic], seed: int) -> None:
    rng = random.Random(seed)
    most = rng.randrange(1, 6)
    trial = make(rng.randrange(1, most + 1), least=rng.randrange(1, most + 1), most=most)
    for number in range(rng.randrange(12)):
        what = rng.choice([ElasticActor.die, ElasticActor.die, ElasticActor.fall_silent])
        trial.clock.at(
            number * 10 + rng.uniform(0, 30), lambda what=what: what(rng.choice(trial.launcher.everybody))
        )
    began, sizes = trial.clock.now, []
    try:
        for _ in range(8):
            sizes.append(trial.next_report().metrics["size"])

        def finish() -> None:
            for actor in trial.world:
                actor.give_sign_of_life()
                actor.say(Finished(actor.rank))
            trial.clock.at(5.0, finish)

        trial.clock.at(1.0, finish)
        while not isinstance(trial.group.next_event(), Finished):
            continue
    except TrainingFailed as error:
        assert "rank " in str(error)
    assert all(size <= most for size in sizes)
    assert trial.clock.now - began < 8 * 20 + 12 * (TIMEOUT_S * 1.5 + WAIT_S + 20)
