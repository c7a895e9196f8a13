"""The worker group over simulated workers: which workers are lost, when, and what the error says."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from fake_workers import REQUEST, TIMEOUT_S, Clock, FakeActor, FakeTrial, failed

from horovod_tune.channel.framing import frame
from horovod_tune.errors import StartFailed, TrainingFailed
from horovod_tune.messages import FailureKind, Finished, LogChunk, LongWait, NeedsWorld, Report
from horovod_tune.spec.trial_spec import PROCESS_START_FACTOR, start_timeout_s

LOST = "HorovodInternalError: connection closed"


def test_actors_that_do_not_start_are_an_error_after_the_start_timeout(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    trial = FakeTrial(clock)
    trial.actors[1].suspend()
    began = clock.now
    once_s = start_timeout_s(TIMEOUT_S, 3)
    limit_s = PROCESS_START_FACTOR * once_s
    with pytest.raises(StartFailed, match=rf"1 of 3 .* longer than {limit_s:g} s to start"):
        trial.group.begin(REQUEST)
    assert clock.now - began == limit_s
    assert caplog.messages[0].startswith(
        f"1 of 3 training actors have taken longer than {once_s:g} s to start"
    )
    trial.group.close()


def test_a_large_world_has_a_longer_start_timeout(clock: Clock) -> None:
    trial = FakeTrial(clock, 512)
    last = trial.actors[-1]
    last.suspend()
    trial.group.world.create()
    last.resume()
    late = trial.group.state.members[-1].description.reply
    clock.call_later(TIMEOUT_S + 100.0, lambda: late.set_result(last.replies["describe"]))
    trial.group.begin(REQUEST)
    assert len(trial.group.state.hosts) == 512
    trial.group.close()


def test_an_actor_that_dies_in_begin_is_named_by_rank_and_host(clock: Clock) -> None:
    trial = FakeTrial(clock)
    trial.actors[2].replies["begin"] = trial.actors[2].die
    trial.group.begin(REQUEST)
    assert trial.error().startswith("rank 2 of 3 on host2 died:")
    trial.group.close()


# -- ranks that report differently often

WAITS = (
    '  File "train.py", line 7, in train\n  File "/torch/distributed/distributed_c10d.py", line 9, in wait\n'
)
SAVES = '  File "train.py", line 8, in train\n  File "/torch/serialization.py", line 9, in save\n'


def begin_ahead(make: Callable[..., FakeTrial], stack: str, reports: int) -> FakeTrial:
    """Begin a trial in which rank 0 made ``reports`` reports, and rank 1 waits in its second one."""
    trial = make(2)
    for _ in range(reports):
        trial.next_report()
    rank_0, rank_1 = trial.actors
    rank_0.replies["reply_now"] = lambda: rank_0.reply_to_poll(LogChunk(0, b"", stack))
    rank_1.reply_to_poll(LongWait(1, 2))
    return trial


def test_a_rank_that_reports_more_often_than_rank_0_is_soon_the_error(make: Callable[..., FakeTrial]) -> None:
    trial = begin_ahead(make, WAITS, 1)
    began = trial.clock.now
    text = trial.error()
    assert text.startswith(
        "rank 1 of 2 on host1 reports more often than rank 0:\n"
        "it waits in its report() number 2, while rank 0, which has made 1, waits in a collective: "
    )
    assert "line 7, in train" in text
    assert trial.clock.now - began < 60


@pytest.mark.parametrize(("stack", "reports"), [(SAVES, 1), ("", 1), (WAITS, 2)])
def test_a_rank_may_wait_long_for_rank_0_that_is_in_no_collective(
    make: Callable[..., FakeTrial], stack: str, reports: int
) -> None:
    trial = begin_ahead(make, stack, reports)
    trial.report_in(600.0)
    assert isinstance(trial.group.next_event(), Report)


# -- lost workers


def test_a_worker_that_died_is_named_by_rank_and_process(make: Callable[..., FakeTrial]) -> None:
    trial = make()
    trial.actors[1].die()
    text = trial.error()
    assert text.startswith("rank 1 of 3 on host1 died:\nits training actor (process 101): ")


def test_a_worker_without_heartbeats_is_lost_after_timeout_s_and_not_before(
    make: Callable[..., FakeTrial],
) -> None:
    trial = make()
    began = trial.clock.now
    trial.actors[2].suspend()
    text = trial.error()
    assert text.startswith(
        "rank 2 of 3 on host2 stopped responding:\nits training actor (process 102): no heartbeat for 60 s"
    )
    # The poll itself may take a quarter of timeout_s, and the last output of the others 5 s.
    assert TIMEOUT_S <= trial.clock.now - began <= TIMEOUT_S * 1.5 + 5


def test_a_worker_that_is_suspended_for_less_than_timeout_s_is_not_lost(
    make: Callable[..., FakeTrial],
) -> None:
    trial = make()
    trial.actors[1].suspend()
    trial.clock.call_later(TIMEOUT_S * 0.9, trial.actors[1].resume)
    trial.send(0, Report(1, {"loss": 1.0}), after_s=TIMEOUT_S * 3)
    assert trial.group.next_event() == Report(1, {"loss": 1.0})


def test_the_time_that_tune_takes_for_a_decision_counts_as_no_missed_heartbeat(
    make: Callable[..., FakeTrial],
) -> None:
    trial = make()
    trial.send(0, Report(1, {}))
    trial.group.next_event()
    trial.clock.now += 10 * TIMEOUT_S  # no events are received meanwhile
    trial.send(0, Report(2, {}), after_s=1.0)
    assert trial.group.next_event() == Report(2, {})


def test_late_messages_of_a_lost_worker_are_ignored(make: Callable[..., FakeTrial]) -> None:
    trial = make()
    trial.actors[2].suspend()
    trial.send(2, Report(7, {"loss": 0.0}), Finished(2))
    # While the group waits for the last output of the others.
    trial.clock.call_later(TIMEOUT_S * 1.25 + 3, trial.actors[2].resume)
    assert trial.error().startswith("rank 2 of 3 on host2 stopped responding")
    assert trial.group.take_logs() == []
    assert not trial.group.end_trial()


def test_two_failures_at_once_are_one_error_with_the_cause_first(make: Callable[..., FakeTrial]) -> None:
    trial = make()
    trial.send(0, failed(0, FailureKind.DISCONNECTED, LOST))
    trial.send(2, failed(2, FailureKind.RAISED, "ValueError: x"))
    assert trial.error() == (
        "rank 2 of 3 on host2 failed:\n(rank 0 on host0 lost contact with the others)\nValueError: x"
    )


def test_the_cause_is_waited_for_when_ranks_have_lost_each_other(make: Callable[..., FakeTrial]) -> None:
    trial = make()
    trial.send(0, failed(0, FailureKind.DISCONNECTED, LOST))
    trial.clock.call_later(1.5, trial.actors[1].die)
    assert trial.error().startswith("rank 1 of 3 on host1 died:\n(rank 0 on host0 lost contact")


def test_a_rank_that_does_not_respond_is_the_cause_when_the_others_lose_contact(
    make: Callable[..., FakeTrial],
) -> None:
    trial = make()
    began = trial.clock.now
    trial.actors[1].suspend()
    trial.send(0, failed(0, FailureKind.DISCONNECTED, LOST))
    trial.send(2, failed(2, FailureKind.DISCONNECTED, LOST))
    assert trial.error().startswith("rank 1 of 3 on host1 stopped responding:")
    assert trial.clock.now - began < 10, "without waiting for timeout_s"


def test_without_a_known_cause_the_error_names_the_ranks_that_lost_contact(
    make: Callable[..., FakeTrial],
) -> None:
    trial = make()
    trial.send(0, failed(0, FailureKind.DISCONNECTED, LOST))
    trial.send(1, failed(1, FailureKind.DISCONNECTED, LOST))
    assert trial.error().startswith("rank 0 of 3 on host0 lost contact with the others:\n(rank 1 on host1")


def test_the_last_output_of_the_other_ranks_is_kept(make: Callable[..., FakeTrial]) -> None:
    trial = make()
    last = LogChunk(2, b"its last words\n")
    trial.actors[2].replies["reply_now"] = lambda: trial.send(2, last)
    trial.send(0, LogChunk(0, b"before\n"), failed(0, FailureKind.RAISED, "ValueError: x"))
    trial.error()
    assert trial.group.take_logs() == [LogChunk(0, b"before\n"), last]


# -- malformed messages


@pytest.mark.parametrize("message", [None, b"\x80\x04.", ["Report"], {"index": 1}, 7, NeedsWorld(1)])
def test_a_message_of_unknown_type_fails_the_trial_and_names_its_sender(
    make: Callable[..., FakeTrial], message: object
) -> None:
    trial = make()
    trial.actors[1].reply_to_poll(message)  # type: ignore[arg-type]
    assert trial.error().startswith("received a malformed message from rank 1 on host1: ")


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\1\xc1", frame("finished"), b"\0\0\0\4\x93\x01\x02\x03"],
)
def test_malformed_bytes_on_a_channel_fail_the_trial_and_name_their_sender(
    make: Callable[..., FakeTrial], data: bytes
) -> None:
    trial = make(by_channel=True)
    trial.launcher.rank_ends[0].send(data)
    assert trial.error().startswith("received a malformed message from rank 0 on host0: ")


# -- random ranks


def schedule_a_rank(actor: FakeActor, trial: FakeTrial, rng: random.Random, sent: list[LogChunk]) -> str:
    """Schedule what a rank sends until its end; return how it ends."""
    at = 0.0
    for number in range(rng.randrange(4)):
        at += rng.uniform(0, 20)
        chunk = LogChunk(actor.rank, b"rank %d line %d\n" % (actor.rank, number))
        messages = [chunk, *([Report(number + 1, {"n": number})] if actor.rank == 0 else [])]
        trial.clock.call_later(at, lambda messages=messages: actor.reply_to_poll(*messages))  # type: ignore[misc]
        sent.append(chunk)
    at += rng.uniform(0, 20)
    end = rng.choice(["finished"] * 6 + ["raised", "disconnected", "died", "suspended"])
    do: dict[str, Callable[[], None]] = {
        "finished": lambda: actor.reply_to_poll(Finished(actor.rank)),
        "raised": lambda: actor.reply_to_poll(failed(actor.rank, FailureKind.RAISED, "ValueError: x")),
        "disconnected": lambda: actor.reply_to_poll(failed(actor.rank, FailureKind.DISCONNECTED, LOST)),
        "died": actor.die,
        "suspended": actor.suspend,
    }
    trial.clock.call_later(at, do[end])
    return end


@pytest.mark.parametrize("seed", range(150))
def test_random_ranks_end_the_trial_in_time_with_the_right_result(
    make: Callable[..., FakeTrial], seed: int
) -> None:
    rng = random.Random(seed)
    trial = make(rng.randrange(1, 6))
    sent: list[LogChunk] = []
    ends = [schedule_a_rank(actor, trial, rng, sent) for actor in trial.actors]
    began, reports = trial.clock.now, 0
    try:
        while not isinstance(event := trial.group.next_event(), Finished):
            reports += 1
            assert event.index == reports
            trial.clock.now += rng.choice([0.0, 0.1, 40.0])
        assert set(ends) == {"finished"}
        assert [each for rank in range(len(ends)) for each in sent if each.rank == rank] == sorted(
            trial.group.take_logs(), key=lambda each: each.rank
        ), "no output is lost"
    except TrainingFailed as error:
        first = str(error).splitlines()[0]
        verb = {
            "failed": "raised",
            "died": "died",
            "stopped responding": "suspended",
            "lost contact": "disconnected",
            "returned from the training function": "finished",  # so the world ended for the others
        }
        (expected,) = [end for text, end in verb.items() if text in first]
        rank = int(first.split()[1])
        assert ends[rank] == expected, (first, ends)
        assert expected != "finished" or "disconnected" in ends
        assert not trial.group.end_trial()
    assert trial.clock.now - began < 4 * 40 + 4 * 20 + 2 * TIMEOUT_S + 10
