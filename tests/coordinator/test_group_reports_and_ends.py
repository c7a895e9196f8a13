"""The worker group over simulated workers: reports, stopped trials, and their end."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_workers import FakeTrial, failed
from processes import run_python

from horovod_tune.channel.framing import frame
from horovod_tune.coordinator.worker_group import EXIT_TIMEOUT_S
from horovod_tune.messages import AwaitedRanks, CheckpointPlace, FailureKind, Finished, Report

LOST = "HorovodInternalError: connection closed"


def send_frame(trial: FakeTrial, run: int, index: int) -> None:
    """Send rank 0's report through its channel."""
    fields = {"run": run, "index": index, "metrics": {"loss": 1.0}, "checkpoint_path": None}
    trial.launcher.rank_ends[0].send(frame("report", **fields))


def test_a_report_is_returned_before_the_end_but_not_that_of_the_previous_trial(
    make: Callable[..., FakeTrial],
) -> None:
    trial = make(by_channel=True)
    send_frame(trial, run=0, index=9)
    send_frame(trial, run=1, index=1)
    for actor in trial.actors:
        actor.reply_to_poll(Finished(actor.rank))
    assert trial.group.next_event() == Report(1, {"loss": 1.0})
    assert trial.group.next_event() == Finished(0)


def test_a_report_that_arrives_with_a_failure_is_returned_before_it(make: Callable[..., FakeTrial]) -> None:
    trial = make()
    trial.send(0, Report(1, {"loss": 1.0}), failed(0, FailureKind.RAISED, "ValueError: x"))
    assert trial.group.next_event() == Report(1, {"loss": 1.0})
    assert "ValueError: x" in trial.error()


def test_reports_are_acknowledged_once_tune_has_decided_with_the_newest_checkpoint(
    make: Callable[..., FakeTrial],
) -> None:
    trial = make()
    trial.send(0, Report(1, {}))
    assert trial.group.next_event() == Report(1, {})
    assert not any(actor.called("acknowledge") for actor in trial.actors)
    trial.send(0, Report(2, {}))
    place = CheckpointPlace("/storage/checkpoint_000001")
    assert trial.group.next_event(place) == Report(2, {})
    trial.finish(after_s=5.0)
    newest = replace(place, report=1)
    acknowledged = [(1, 1, newest), (1, 2, newest)]
    assert trial.actors[0].called("acknowledge")[:2] == acknowledged
    # Rank 0 has returned: others must not wait for it in further reports.
    assert [actor.called("acknowledge") for actor in trial.actors[1:]] == [
        [*acknowledged, (1, math.inf, newest)]
    ] * 2


def test_when_a_channel_is_closed_reports_are_released_by_a_call(make: Callable[..., FakeTrial]) -> None:
    trial = make(by_channel=True)
    send_frame(trial, run=1, index=1)
    assert trial.group.next_event() == Report(1, {"loss": 1.0})
    trial.launcher.rank_ends[0].close()
    trial.send(0, Report(2, {}), after_s=1.0)
    assert trial.group.next_event() == Report(2, {})
    assert trial.actors[0].called("acknowledge") == [(1, 1, None)]


@pytest.mark.long
@pytest.mark.parametrize("way", ["fixed", "elastic"])
def test_a_report_takes_one_call_of_ray_for_each_rank_on_another_host(way: str) -> None:
    ranks = 64
    figures = json.loads(
        run_python("-m", "benchmarks.scale_reports", way, ranks, 0.5, cwd=Path(__file__).parents[2]).stdout
    )
    # Eight ranks per host: those of the coordinator's host are connected to it.
    assert figures["connected"] == 8
    assert figures["ray_calls_per_report"] == pytest.approx(ranks - 8, rel=0.05)
    assert figures["reports_per_s"] > 0


# -- the end


def let_stop(trial: FakeTrial, *ranks: int) -> None:
    """Make these ranks leave the training function when they are asked to."""
    for rank in ranks:
        trial.actors[rank].replies["stop_training"] = lambda rank=rank: trial.actors[rank].reply_to_poll(
            Finished(rank, has_returned=False)
        )


def test_a_stopped_trial_breaks_the_world_of_ranks_in_a_collective(make: Callable[..., FakeTrial]) -> None:
    trial = make()
    let_stop(trial, 0)
    for actor in trial.actors[1:]:
        end = failed(actor.rank, FailureKind.DISCONNECTED, LOST)
        actor.replies["close_world"] = lambda actor=actor, end=end: actor.reply_to_poll(end)
    assert trial.group.end_trial()
    assert all(len(actor.called("close_world")) == 1 for actor in trial.actors)


@pytest.mark.parametrize("dies", [False, True])
def test_a_rank_that_does_not_stop_is_killed_after_seconds(
    make: Callable[..., FakeTrial], dies: bool, caplog: pytest.LogCaptureFixture
) -> None:
    trial = make()
    began = trial.clock.now
    let_stop(trial, 0, 1)
    if dies:
        trial.actors[2].replies["stop_training"] = trial.actors[2].die
    assert trial.group.end_trial() == (not dies)
    assert trial.clock.now - began < 6
    # The other ranks have the time that Python takes to exit.
    assert [actor.called("end_trial") for actor in trial.actors[:2]] == [[(EXIT_TIMEOUT_S,)]] * 2
    if not dies:
        assert trial.actors[2].called("end_trial") == [(0.0,)]
        assert caplog.messages == [
            "rank(s) 2 did not leave the training function within 5 s, and were killed"
        ]


@pytest.mark.parametrize(
    "prepare", [lambda trial: trial.actors[1].suspend(), lambda trial: trial.actors[2].die()]
)
def test_workers_that_do_not_end_their_ranks_run_no_other_trial(
    make: Callable[..., FakeTrial], prepare: Callable[[FakeTrial], None]
) -> None:
    trial = make()
    trial.finish()
    began = trial.clock.now
    prepare(trial)
    assert not trial.group.end_trial()
    assert trial.clock.now - began <= EXIT_TIMEOUT_S + 5


def test_ranks_that_lose_contact_when_one_returns_early_name_it(make: Callable[..., FakeTrial]) -> None:
    trial = make()
    trial.send(1, Finished(1))
    trial.send(0, failed(0, FailureKind.DISCONNECTED, LOST), after_s=1.0)
    trial.send(2, failed(2, FailureKind.DISCONNECTED, LOST), after_s=1.0)
    assert trial.error().startswith("rank 1 of 3 on host1 returned from the training function, while others")


def test_a_rank_that_returns_while_others_wait_for_it_in_a_collective_fails_the_trial(
    make: Callable[..., FakeTrial],
) -> None:
    trial = make()
    trial.send(1, Finished(1))
    trial.send(0, AwaitedRanks({1: "allreduce.grad"}), after_s=61.0)
    text = trial.error()
    assert text.startswith("rank 1 of 3 on host1 returned from the training function"), text
    assert "the others wait for rank 1 in allreduce.grad" in text


@pytest.mark.parametrize(
    ("returns_after_s", "stalls_after_s", "awaited"),
    [
        (0.0, 61.0, 2),  # which is only late
        (17.0, 18.0, 1),  # the stall is older: rank 1 then entered the collective and returned
    ],
)
def test_other_ranks_continue_if_no_collective_waits_for_a_rank_that_had_returned(
    make: Callable[..., FakeTrial], returns_after_s: float, stalls_after_s: float, awaited: int
) -> None:
    trial = make()
    trial.send(1, Finished(1), after_s=returns_after_s)
    trial.send(0, AwaitedRanks({awaited: "allreduce.grad"}), after_s=stalls_after_s)
    trial.send(0, Report(1, {"loss": 1.0}), after_s=90.0)
    assert trial.group.next_event() == Report(1, {"loss": 1.0})
