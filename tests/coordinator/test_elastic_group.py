"""An elastic worker group over simulated workers: how its world shrinks, grows and fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fake_workers import REQUEST, TIMEOUT_S, WAIT_S, FakeActor, FakeTrial, failed
from ray.exceptions import ActorDiedError

from horovod_tune.coordinator.policy import WORLDS_WITHOUT_REPORT
from horovod_tune.errors import StartFailed, TrainingFailed
from horovod_tune.messages import AwaitedRanks, FailureKind, Finished, NeedsWorld, Report

DIED = (
    "rank 1 on host1 died: its training actor (process 101): "
    "The actor died unexpectedly before finishing this task."
)


def test_the_other_ranks_continue_and_the_reason_is_recorded(make: Callable[..., FakeTrial]) -> None:
    trial = make(3, min_workers=2, max_workers=3, cluster_is_full=True)
    assert trial.next_report() == Report(1, {"size": 3})
    trial.world[1].die()
    assert trial.next_report() == Report(2, {"size": 2})
    assert [call[2] for call in trial.world[0].called("rejoin")] == [1], "the number of reports"
    assert trial.group.state.changes == [DIED]
    assert trial.launcher.abandoned, "ranks that wait for the dead one fail at once"
    assert [actor.rank for actor in trial.world] == [0, 1], "ranks are assigned again"


@pytest.mark.parametrize("after_s", [0.0, 0.01])
def test_a_report_in_transit_when_the_world_breaks_is_made_again(
    make: Callable[..., FakeTrial], after_s: float
) -> None:
    """Rank 0 has left its report, and may have deleted the directory of its checkpoint."""
    trial = make(2, min_workers=1, max_workers=2, cluster_is_full=True)
    first, other = trial.world
    del first.replies["break_world"]
    other.die()
    trial.send(0, Report(1, {}, "/tmp/deleted"), after_s=after_s)
    trial.send(0, NeedsWorld(0), after_s=after_s + 0.01)
    assert trial.next_report() == Report(1, {"size": 1})
    assert first.called("rejoin")[0][2] == 0, "the number of reports"


def test_a_rank_that_hangs_while_others_wait_in_a_collective_is_removed(
    make: Callable[..., FakeTrial],
) -> None:
    trial = make(3, min_workers=2, max_workers=3, cluster_is_full=True)
    assert trial.next_report().metrics == {"size": 3}
    first, hung, _ = trial.world
    del hung.replies["break_world"]  # it is alive, but does not leave the world
    first.has_left = True
    first.reply_to_poll(NeedsWorld(0, "HorovodInternalError", "Missing ranks: 1"))
    trial.clock.call_later(TIMEOUT_S + 10.0, lambda: first.reply_to_poll(Report(2, {"size": 2})))
    assert trial.group.next_event() == Report(2, {"size": 2})
    hung_text = "its training actor (process 101): did not leave its broken world within timeout_s=60 s"
    assert trial.group.state.changes == [f"rank 1 on host1 hung: {hung_text}"]
    assert hung.called("kill")


def test_a_stalled_collective_fails_the_trial_if_no_rank_hangs(make: Callable[..., FakeTrial]) -> None:
    trial = make(2, min_workers=1, max_workers=2)
    first = trial.world[0]
    first.has_left = True
    first.reply_to_poll(NeedsWorld(0, "HorovodInternalError", "Missing ranks: 1"))
    error = trial.error()
    assert "rank 0 of 2 on host0 waited in a collective that not all ranks entered" in error
    assert "Missing ranks: 1" in error


@pytest.mark.parametrize("stalled", ["", "RuntimeError: rank 1 has returned"])
def test_a_rank_that_returns_while_another_waits_for_it_is_named_at_once(
    make: Callable[..., FakeTrial], stalled: str
) -> None:
    trial = make(2, min_workers=1, max_workers=2)
    began = trial.clock.now
    awaited = [AwaitedRanks({1: "broadcast"})] if stalled else []
    trial.send(1, Finished(1))
    trial.send(0, *awaited, NeedsWorld(0, "RuntimeError", stalled))
    error = trial.error()
    assert error.startswith("rank 1 of 2 on host1 returned from the training function, while others wait")
    assert trial.clock.now - began < 10.0


def test_if_the_function_cannot_be_called_again_the_error_names_the_lost_rank(
    make: Callable[..., FakeTrial],
) -> None:
    """It has reported but not committed, so its ranks fail when their world breaks."""
    trial = make(3, min_workers=2, max_workers=3, cluster_is_full=True)
    assert trial.next_report().metrics == {"size": 3}
    trial.world[1].die()
    for actor in (trial.world[0], trial.world[2]):
        actor.reply_to_poll(failed(actor.rank, FailureKind.DISCONNECTED, "connection closed"))
    assert "rank 1 of 3 on host1 died" in trial.error()


def test_a_scheduler_resizes_a_running_trial(make: Callable[..., FakeTrial]) -> None:
    trial = make(2, min_workers=1, max_workers=2)
    first = list(trial.world)
    assert trial.group.world.resize(4, b"four")
    assert trial.next_report().metrics == {"size": 4}
    assert trial.world[:2] == first, "the ranks that stay keep their processes"
    assert trial.group.world.resize(3, b"three")
    assert trial.next_report().metrics == {"size": 3}
    assert trial.group.state.changes == ["more workers join", "a scheduler reduced the trial to 3 rank(s)"]
    assert trial.launcher.released == [3]
    assert [call[3] for call in first[0].called("rejoin")] == [b"four", b"three"]


@pytest.mark.parametrize("why", ["below its placement group", "nothing committed", "finished"])
def test_a_resize_that_needs_a_restart_is_refused(make: Callable[..., FakeTrial], why: str) -> None:
    trial = make(2, min_workers=1, max_workers=2)
    trial.next_report()
    if why == "nothing committed":
        trial.world[0].replies["can_restore"] = False
    if why == "finished":
        for actor in trial.world:
            actor.reply_to_poll(Finished(actor.rank))
        assert isinstance(trial.group.next_event(), Finished)
    assert not trial.group.world.resize(1 if why == "below its placement group" else 4, b"")
    assert trial.group.state.changes == [] and len(trial.launcher.all_actors) == 2


def test_fewer_than_min_workers_wait_for_others_and_then_fail(make: Callable[..., FakeTrial]) -> None:
    trial = make(2, min_workers=2, max_workers=2, cluster_is_full=True)
    trial.next_report()
    began = trial.clock.now
    trial.world[1].die()
    with pytest.raises(
        TrainingFailed, match=r"(?s)rank 1 of 2 on host1 died.*1 rank\(s\) are left.*=30 s"
    ) as raised:
        trial.group.next_event()
    assert WAIT_S <= trial.clock.now - began <= WAIT_S + 10
    assert raised.value.lost_nodes == ("node 1",)


@pytest.mark.parametrize("hangs", [False, True])
def test_a_trial_continues_when_a_worker_starts_while_too_few_wait(
    make: Callable[..., FakeTrial], hangs: bool
) -> None:
    trial = make(2, min_workers=2, max_workers=2, cluster_is_full=True)
    if hangs:  # it is lost, and replaced, only after `TIMEOUT_S`
        del trial.world[1].replies["break_world"]
        trial.world[0].leave_world()
    else:
        trial.world[1].die()
    lost_s = TIMEOUT_S if hangs else 0.0

    def make_room() -> None:
        trial.launcher.cluster_is_full = False
        trial.launcher.all_actors[-1].die()  # which never started; another takes its slot

    trial.clock.call_later(lost_s + WAIT_S / 2, make_room)
    trial.clock.call_later(lost_s + WAIT_S / 2 + 5, lambda: trial.report_in(0))
    assert trial.group.next_event() == Report(1, {"size": 2})


@pytest.mark.parametrize("how", [FakeActor.die, FakeActor.leave_world])
def test_worlds_that_break_repeatedly_without_a_report_fail_the_trial(
    make: Callable[..., FakeTrial], how: Callable[[FakeActor], None]
) -> None:
    trial = make(2, min_workers=1, max_workers=2)

    def break_it() -> None:
        how(trial.world[-1])
        trial.clock.call_later(1.0, break_it)

    trial.clock.call_later(1.0, break_it)
    assert f"More than {WORLDS_WITHOUT_REPORT} worlds in a row broke before a report" in trial.error()


def test_a_rank_that_does_not_leave_a_broken_world_is_lost_too(make: Callable[..., FakeTrial]) -> None:
    trial = make(3, min_workers=1, max_workers=3, cluster_is_full=True)
    del trial.world[2].replies["break_world"]
    trial.world[1].die()
    began = trial.clock.now
    trial.clock.call_later(TIMEOUT_S + 10, lambda: trial.report_in(0))
    assert trial.group.next_event() == Report(1, {"size": 1})
    assert trial.clock.now - began <= TIMEOUT_S + 10
    (change,) = trial.group.state.changes
    assert change.startswith(f"{DIED}; rank 2 on host2 hung: its training actor (process 102): did not leave")


def test_a_suspended_rank_delays_the_next_world_by_seconds_only(make: Callable[..., FakeTrial]) -> None:
    trial = make(3, min_workers=1, max_workers=3, cluster_is_full=True)
    trial.world[2].suspend()
    trial.world[1].die()
    trial.report_in(8.0)
    assert trial.group.next_event() == Report(1, {"size": 1})
    (change,) = trial.group.state.changes
    assert change.startswith(
        f"{DIED}; rank 2 on host2 stopped responding: its training actor (process 102): "
    )


def test_offer_change_is_repeated_until_a_rank_leaves(make: Callable[..., FakeTrial]) -> None:
    """Ranks in `hvd.elastic.run` forget the first offers while they enter a world."""
    trial = make(2, min_workers=1, max_workers=2)
    first, offers = list(trial.world), 0

    def forget_twice() -> None:
        nonlocal offers
        offers += 1
        if offers > 2:
            first[0].leave_world()

    first[0].replies["offer_change"] = forget_twice
    first[1].replies["offer_change"] = None
    assert trial.group.world.resize(3, b"")
    while trial.next_report().metrics != {"size": 3}:
        assert offers < 3
    assert first[0].called("offer_change") == [(0,)] * 3
    assert trial.group.state.changes == ["more workers join"]


def dies_in(call: str, which: int = 1) -> Callable[[list[FakeActor]], None]:
    """Make actor ``which`` die in its next call of the method ``call``."""

    def plan(actors: list[FakeActor]) -> None:
        def answer() -> None:
            actors[which].die()
            raise ActorDiedError

        actors[which].replies[call] = answer

    return plan


START_CALLS = ["describe", "begin"]


@pytest.mark.parametrize("call", START_CALLS)
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_trial_starts_without_a_rank_that_dies_during_the_start(
    make: Callable[..., FakeTrial], call: str, which: int
) -> None:
    trial = make(3, min_workers=2, max_workers=3, cluster_is_full=True, prepare=dies_in(call, which=which))
    assert trial.next_report().metrics == {"size": 2}
    assert len(trial.launcher.all_actors) == 4, "with a replacement"


@pytest.mark.parametrize("call", START_CALLS)
def test_a_start_with_too_few_ranks_fails_and_names_the_dead_ones(
    make: Callable[..., FakeTrial], call: str
) -> None:
    try:
        trial = make(3, min_workers=3, max_workers=3, cluster_is_full=True, prepare=dies_in(call))
    except StartFailed as error:
        assert call != "begin" and " failed to " in str(error)
        return
    with pytest.raises(TrainingFailed, match=r"(?s)rank 1 of 3 on host1 died.*2 rank\(s\) are left"):
        trial.group.next_event()


def test_a_worker_that_does_not_start_in_time_is_replaced(make: Callable[..., FakeTrial]) -> None:
    trial = make(
        3, min_workers=2, max_workers=3, cluster_is_full=True, prepare=lambda actors: actors[1].suspend()
    )
    assert trial.next_report().metrics == {"size": 2}
    assert trial.launcher.all_actors[1].called("kill")


def test_a_reused_worker_that_died_before_the_next_trial_is_replaced(make: Callable[..., FakeTrial]) -> None:
    trial = make(3, min_workers=2, max_workers=3)
    for actor in trial.world:
        actor.reply_to_poll(Finished(actor.rank))
    assert isinstance(trial.group.next_event(), Finished)
    assert trial.group.end_trial()
    trial.world[1].die()
    trial.group.begin(REQUEST)
    assert trial.next_report().metrics == {"size": 3}


@pytest.mark.parametrize("call", START_CALLS)
def test_a_worker_that_dies_while_it_joins_is_replaced(make: Callable[..., FakeTrial], call: str) -> None:
    trial = make(3, min_workers=1, max_workers=3, cluster_is_full=True)
    trial.launcher.on_create = dies_in(call, which=0)
    trial.launcher.cluster_is_full = False
    trial.world[1].die()
    while trial.next_report().metrics != {"size": 3}:
        assert trial.reports < 20
    assert len(trial.launcher.all_actors) == 5, "the one that died and its replacement"


@pytest.mark.parametrize("kind", [FailureKind.DIED, FailureKind.UNRESPONSIVE])
def test_a_lost_rank_whose_actor_lives_starts_again_on_it(
    make: Callable[..., FakeTrial], kind: FailureKind
) -> None:
    trial = make(3, min_workers=2, max_workers=3)
    before = list(trial.actors)
    trial.actors[1].reply_to_poll(failed(1, kind, "process 7: it was ended by SIGKILL"))
    assert trial.next_report().metrics == {"size": 3}
    assert trial.launcher.all_actors == before and not any(actor.called("kill") for actor in before)
    assert [len(actor.called("begin")) for actor in before] == [1, 2, 1]
    verb = "died" if kind is FailureKind.DIED else "stopped responding"
    assert trial.group.state.changes == [f"rank 1 on host1 {verb}: process 7: it was ended by SIGKILL"]


def test_a_rank_that_raises_fails_an_elastic_trial(make: Callable[..., FakeTrial]) -> None:
    trial = make(3, min_workers=2, max_workers=3)
    trial.actors[1].reply_to_poll(failed(1, FailureKind.RAISED, "ValueError: x"))
    assert "ValueError: x" in trial.error()


def test_a_worker_that_dies_just_before_it_joins_is_replaced(make: Callable[..., FakeTrial]) -> None:
    trial = make(3, min_workers=1, max_workers=3)
    assign = trial.launcher.assign

    def assign_after_a_death(workers: Sequence[Any], infos: Any, **options: Any) -> Any:
        trial.launcher.assign = assign
        workers[-1].die()
        return assign(workers, infos, **options)

    trial.launcher.assign = assign_after_a_death
    trial.world[1].die()
    while trial.next_report().metrics != {"size": 3}:
        assert trial.reports < 20


@pytest.mark.parametrize(("slot", "min_workers"), [(1, 1), (1, 4), (0, 1)])
def test_a_trial_continues_or_fails_if_a_host_is_unsuitable(
    make: Callable[..., FakeTrial], slot: int, min_workers: int
) -> None:
    trial = make(4, min_workers=min_workers, max_workers=4, cluster_is_full=slot == 0)
    assign, text = trial.launcher.assign, "nics=['ib0'] names no interface of the host"

    def refuse(workers: Sequence[Any], infos: Any, **options: Any) -> Any:
        if any(worker.slot == slot for worker in workers):
            raise StartFailed(text)
        return assign(workers, infos, **options)

    trial.launcher.assign = refuse
    trial.world[1].die()
    trial.world[2].die()
    if min_workers == 4 or slot == 0:  # the host is needed
        assert text in trial.error()
        return
    while trial.next_report().metrics != {"size": 3}:
        assert trial.reports < 5
    assert text in trial.group.state.changes[0]


def test_a_slot_whose_actors_die_at_the_start_is_retried_less_and_less_often(
    make: Callable[..., FakeTrial],
) -> None:
    trial = make(2, min_workers=1, max_workers=2)
    trial.launcher.on_every_create = dies_in("describe", which=0)
    trial.world[1].die()
    for _ in range(10):
        assert trial.next_report().metrics == {"size": 1}
    assert 3 < len(trial.launcher.all_actors) < 15, "in 200 s"


@pytest.mark.parametrize("seed", range(60))
def test_after_random_losses_the_trial_continues_or_fails_in_time(
    make: Callable[..., FakeTrial], seed: int
) -> None:
    rng = random.Random(seed)
    max_workers = rng.randrange(1, 6)
    trial = make(
        rng.randrange(1, max_workers + 1),
        min_workers=rng.randrange(1, max_workers + 1),
        max_workers=max_workers,
    )
    for number in range(rng.randrange(12)):
        what = rng.choice([FakeActor.die, FakeActor.die, FakeActor.suspend])
        trial.clock.call_later(
            number * 10 + rng.uniform(0, 30), lambda what=what: what(rng.choice(trial.launcher.all_actors))
        )
    began, sizes = trial.clock.now, []
    try:
        for _ in range(8):
            sizes.append(trial.next_report().metrics["size"])

        def finish() -> None:
            for actor in trial.world:
                actor.send_heartbeat()
                actor.reply_to_poll(Finished(actor.rank))
            trial.clock.call_later(5.0, finish)

        trial.clock.call_later(1.0, finish)
        while not isinstance(trial.group.next_event(), Finished):
            continue
    except TrainingFailed as error:
        assert "rank " in str(error)
    assert all(size <= max_workers for size in sizes)
    assert trial.clock.now - began < 8 * 20 + 12 * (TIMEOUT_S * 1.5 + WAIT_S + 20)


def test_any_number_of_worlds_may_break_if_each_of_them_has_reported(make: Callable[..., FakeTrial]) -> None:
    trial = make(2, min_workers=1, max_workers=2)
    for _ in range(2 * WORLDS_WITHOUT_REPORT):
        trial.world[1].die()
        trial.next_report()
        trial.settle()


def test_a_worker_whose_node_drains_before_it_joins_starts_elsewhere(make: Callable[..., FakeTrial]) -> None:
    trial = make(2, min_workers=1, max_workers=2)
    trial.launcher.draining = {"node 3"}
    trial.next_report()
    assert trial.group.world.resize(4, b"")
    trial.settle()
    assert sorted(trial.group.state.hosts.values()) == ["host0", "host1", "host2", "hostspare"]
    # It is lost there, and must not return to the host that drains.
    next(actor for actor in trial.world if actor.slot == 3).die()
    trial.next_report()
    trial.settle()
    assert sorted(trial.group.state.hosts.values()) == ["host0", "host1", "host2", "hostspare"]
    assert len(trial.launcher.all_actors) == 6
