"""The worker group over simulated workers: reports, stopped trials, and whether workers can be reused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from fake_workers import Group, error_of, failed

from horovod_tune.channel.framing import frame
from horovod_tune.messages import (
    AwaitedRanks,
    CheckpointPlace,
    FailureKind,
    Finished,
    Report,
)

LOST = "HorovodInternalError: connection closed"


def report_frame(run: int, index: int) -> bytes:
    return frame("report", run=run, index=index, metrics={"loss": 1.0}, checkpoint_path=None)


def test_a_report_frame_of_the_previous_trial_is_ignored(make: Callable[..., Group]) -> None:
    group = make(by_channel=True)
    group.launcher.rank_ends[0].send(report_frame(run=0, index=9))
    group.launcher.rank_ends[0].send(report_frame(run=1, index=1))
    assert group.worker_group.next_event() == Report(1, {"loss": 1.0})


def test_a_report_that_arrives_with_the_end_is_returned_before_it(make: Callable[..., Group]) -> None:
    group = make(by_channel=True)
    group.launcher.rank_ends[0].send(report_frame(run=1, index=1))
    for actor in group.actors:
        actor.reply_to_poll(Finished(actor.rank))
    assert group.worker_group.next_event() == Report(1, {"loss": 1.0})
    assert group.worker_group.next_event() == Finished(0)


def test_a_report_that_arrives_with_a_failure_is_returned_before_it(make: Callable[..., Group]) -> None:
    group = make()
    group.actors[0].reply_to_poll(Report(1, {"loss": 1.0}), failed(0, FailureKind.RAISED, "ValueError: x"))
    assert group.worker_group.next_event() == Report(1, {"loss": 1.0})
    assert "ValueError: x" in error_of(group)


def test_reports_of_other_ranks_are_released_when_rank_0_has_returned(
    make: Callable[..., Group],
) -> None:
    group = make()
    group.actors[0].reply_to_poll(Finished(0))
    for actor in group.actors[1:]:
        group.clock.call_later(5.0, lambda actor=actor: actor.reply_to_poll(Finished(actor.rank)))  # type: ignore[misc]
    assert group.worker_group.next_event() == Finished(0)
    assert [actor.called("proceed") for actor in group.actors[1:]] == [[(math.inf, None)]] * 2


def test_no_report_is_released_before_tune_has_decided(make: Callable[..., Group]) -> None:
    group = make()
    group.actors[0].reply_to_poll(Report(1, {}))
    group.worker_group.next_event()
    assert not any(actor.called("proceed") for actor in group.actors)
    for actor in group.actors:
        group.clock.call_later(1.0, lambda actor=actor: actor.reply_to_poll(Finished(actor.rank)))  # type: ignore[misc]
    assert group.worker_group.next_event(CheckpointPlace("/stored")) == Finished(0)
    newest = CheckpointPlace("/stored", report=1)
    assert [actor.called("proceed")[0] for actor in group.actors] == [(1, newest)] * 3


def test_when_a_channel_is_closed_reports_are_released_by_a_call(make: Callable[..., Group]) -> None:
    group = make(by_channel=True)
    group.launcher.rank_ends[0].send(report_frame(run=1, index=1))
    assert group.worker_group.next_event() == Report(1, {"loss": 1.0})
    group.launcher.rank_ends[0].close()
    group.clock.call_later(1.0, lambda: group.actors[0].reply_to_poll(Report(2, {})))
    assert group.worker_group.next_event() == Report(2, {})
    assert group.actors[0].called("proceed") == [(1, None)]


# -- the end


def test_a_stopped_trial_breaks_the_world_of_ranks_in_a_collective(make: Callable[..., Group]) -> None:
    group = make()
    group.actors[0].replies["stop_training"] = lambda: group.actors[0].reply_to_poll(
        Finished(0, has_returned=False)
    )
    for actor in group.actors[1:]:
        end = failed(actor.rank, FailureKind.DISCONNECTED, LOST)
        actor.replies["close_world"] = lambda actor=actor, end=end: actor.reply_to_poll(end)
    assert group.worker_group.end_trial() == []
    assert all(len(actor.called("close_world")) == 1 for actor in group.actors)


def test_a_function_that_does_not_stop_delays_the_end_by_seconds_only(make: Callable[..., Group]) -> None:
    group = make()
    began = group.clock.now
    for actor in group.actors[:2]:
        actor.replies["stop_training"] = lambda actor=actor: actor.reply_to_poll(
            Finished(actor.rank, has_returned=False)
        )
    assert group.worker_group.end_trial() == ["rank(s) [2] did not leave the training function in 5 s"]
    assert group.clock.now - began < 6


def test_workers_are_not_reused_if_a_rank_dies_while_it_is_stopped(make: Callable[..., Group]) -> None:
    group = make()
    for actor in group.actors[:2]:
        actor.replies["stop_training"] = lambda actor=actor: actor.reply_to_poll(
            Finished(actor.rank, has_returned=False)
        )
    group.actors[2].replies["stop_training"] = group.actors[2].die
    (problem,) = group.worker_group.end_trial()
    assert "died" in problem or "could not be" in problem


def finish(group: Group) -> None:
    for actor in group.actors:
        actor.reply_to_poll(Finished(actor.rank))
    assert group.worker_group.next_event() == Finished(0)


def test_what_a_reset_could_not_restore_is_returned(make: Callable[..., Group]) -> None:
    group = make()
    group.actors[1].replies["reset"] = ["rank 1 left a thread"]
    finish(group)
    assert group.worker_group.end_trial() == ["rank 1 left a thread"]


def test_a_reset_without_a_reply_ends_with_a_timeout(make: Callable[..., Group]) -> None:
    group = make()
    finish(group)
    began = group.clock.now
    group.actors[1].suspend()
    (problem,) = group.worker_group.end_trial()
    assert problem.startswith("a rank could not be reset") and group.clock.now - began <= 10


def test_a_worker_that_dies_in_its_reset_is_reported(make: Callable[..., Group]) -> None:
    group = make()
    finish(group)
    group.actors[2].die()
    (problem,) = group.worker_group.end_trial()
    assert problem.startswith("a rank could not be reset")


def test_a_rank_that_returns_while_others_wait_for_it_in_a_collective_fails_the_trial(
    make: Callable[..., Group],
) -> None:
    group = make()
    group.actors[1].reply_to_poll(Finished(1))
    group.clock.call_later(61.0, lambda: group.actors[0].reply_to_poll(AwaitedRanks({1: "allreduce.grad"})))
    text = error_of(group)
    assert text.startswith("rank 1 of 3 on host1 returned from the training function"), text
    assert "the others wait for rank 1 in allreduce.grad" in text


def test_other_ranks_continue_if_no_collective_waits_for_a_rank_that_returned(
    make: Callable[..., Group],
) -> None:
    group = make()
    group.actors[1].reply_to_poll(Finished(1))
    # Rank 2 is only late.
    group.clock.call_later(61.0, lambda: group.actors[0].reply_to_poll(AwaitedRanks({2: "allreduce.grad"})))
    group.clock.call_later(90.0, lambda: group.actors[0].reply_to_poll(Report(1, {"loss": 1.0})))
    assert group.worker_group.next_event() == Report(1, {"loss": 1.0})


def test_a_stall_from_before_a_rank_returned_does_not_count(make: Callable[..., Group]) -> None:
    group = make()
    # Rank 1 enters the collective late and returns; rank 0 sends the older stall only then.
    group.clock.call_later(17.0, lambda: group.actors[1].reply_to_poll(Finished(1)))
    group.clock.call_later(18.0, lambda: group.actors[0].reply_to_poll(AwaitedRanks({1: "allreduce.grad"})))
    group.clock.call_later(90.0, lambda: group.actors[0].reply_to_poll(Report(1, {"loss": 1.0})))
    assert group.worker_group.next_event() == Report(1, {"loss": 1.0})


def test_the_newest_checkpoint_is_sent_with_every_acknowledgement(make: Callable[..., Group]) -> None:
    group = make()
    place = CheckpointPlace("/storage/checkpoint_000001")
    for index, checkpoint in ((1, None), (2, place)):
        group.actors[0].reply_to_poll(Report(index, {}))
        group.worker_group.next_event(checkpoint)
    group.actors[0].reply_to_poll(Finished(0))
    for actor in group.actors[1:]:
        group.clock.call_later(5.0, lambda actor=actor: actor.reply_to_poll(Finished(actor.rank)))  # type: ignore[misc]
    assert group.worker_group.next_event() == Finished(0)
    newest = replace(place, report=1)
    assert group.actors[1].called("proceed") == [(1, newest), (2, newest), (math.inf, newest)]
