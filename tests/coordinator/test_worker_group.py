"""The worker group over workers that do as a test says: who is lost, why, and after how long."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from fake_workers import ORDER, TIMEOUT_S, Clock, FakeActor, Group, error_of, failed

from horovod_tune.channel.framing import frame
from horovod_tune.errors import StartFailed, TrainingFailed
from horovod_tune.messages import FailureKind, Finished, LogChunk, NeedsWorld, Report
from horovod_tune.spec.trial_spec import PROCESS_START_FACTOR, start_timeout_s

LOST = "HorovodInternalError: connection closed"


def test_an_actor_that_does_not_start_is_named_with_the_time_it_had(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    group = Group(clock)
    group.actors[1].fall_silent()
    began = clock.now
    once_s = start_timeout_s(TIMEOUT_S, 3)
    limit_s = PROCESS_START_FACTOR * once_s
    with pytest.raises(StartFailed, match=rf"1 of 3 .* longer than {limit_s:g} s to start"):
        group.real.begin(ORDER)
    assert clock.now - began == limit_s
    assert caplog.messages[0].startswith(
        f"1 of 3 training actors have taken longer than {once_s:g} s to start"
    )
    group.real.close()


def test_an_actor_that_dies_between_its_ranks_and_the_trial_is_named_by_rank_and_host(
    clock: Clock,
) -> None:
    group = Group(clock)
    group.actors[2].replies["assign"] = group.actors[2].die
    group.real.begin(ORDER)
    assert error_of(group).startswith("rank 2 of 3 on host2 died:")
    group.real.close()


# -- lost workers


def test_a_worker_that_died_is_named_with_what_its_host_knows(make: Callable[..., Group]) -> None:
    group = make()
    group.actors[1].die()
    text = error_of(group)
    assert text.startswith("rank 1 of 3 on host1 died:\nprocess 101: ")


def test_a_silent_worker_is_lost_after_its_time_and_not_before(make: Callable[..., Group]) -> None:
    group = make()
    began = group.clock.now
    group.actors[2].fall_silent()
    text = error_of(group)
    assert text.startswith(
        "rank 2 of 3 on host2 stopped responding:\nprocess 102: no heartbeat for 60 s (timeout_s)"
    )
    # A quarter of the time is the poll's own; the last output of the others is waited for at most 5 s.
    assert TIMEOUT_S <= group.clock.now - began <= TIMEOUT_S * 1.5 + 5


def test_a_worker_that_was_stopped_for_less_is_not_lost(make: Callable[..., Group]) -> None:
    group = make()
    group.actors[1].fall_silent()
    group.clock.at(TIMEOUT_S * 0.9, group.actors[1].wake_up)
    group.clock.at(TIMEOUT_S * 3, lambda: group.actors[0].say(Report(1, {"loss": 1.0})))
    assert group.real.next_event() == Report(1, {"loss": 1.0})


def test_time_in_which_tune_decides_makes_nobody_silent(make: Callable[..., Group]) -> None:
    group = make()
    group.actors[0].say(Report(1, {}))
    group.real.next_event()
    group.real.proceed(1, None)
    group.clock.now += 10 * TIMEOUT_S  # nobody has listened
    group.clock.at(1.0, lambda: group.actors[0].say(Report(2, {})))
    assert group.real.next_event() == Report(2, {})


def test_a_late_answer_of_a_worker_that_is_lost_changes_nothing(make: Callable[..., Group]) -> None:
    group = make()
    group.actors[2].fall_silent()
    group.actors[2].say(Report(7, {"loss": 0.0}), Finished(2))
    group.clock.at(TIMEOUT_S * 1.25 + 3, group.actors[2].wake_up)  # while the others' output is waited for
    assert error_of(group).startswith("rank 2 of 3 on host2 stopped responding")
    assert group.real.take_logs() == []
    assert group.real.end_trial() == ["a rank failed"]


def test_two_failures_at_once_are_one_error_with_the_cause_first(make: Callable[..., Group]) -> None:
    group = make()
    group.actors[0].say(failed(0, FailureKind.DISCONNECTED, LOST))
    group.actors[2].say(failed(2, FailureKind.RAISED, "ValueError: x"))
    assert error_of(group) == (
        "rank 2 of 3 on host2 failed:\n(rank 0 on host0 lost contact with the others)\nValueError: x"
    )


def test_the_cause_is_waited_for_when_ranks_have_lost_each_other(make: Callable[..., Group]) -> None:
    group = make()
    group.actors[0].say(failed(0, FailureKind.DISCONNECTED, LOST))
    group.clock.at(1.5, group.actors[1].die)
    assert error_of(group).startswith("rank 1 of 3 on host1 died:\n(rank 0 on host0 lost contact")


def test_a_rank_that_answers_no_ping_is_the_cause_that_the_others_lost(make: Callable[..., Group]) -> None:
    group = make()
    began = group.clock.now
    group.actors[1].fall_silent()
    group.actors[0].say(failed(0, FailureKind.DISCONNECTED, LOST))
    group.actors[2].say(failed(2, FailureKind.DISCONNECTED, LOST))
    assert error_of(group).startswith("rank 1 of 3 on host1 stopped responding:")
    assert group.clock.now - began < 10, "without waiting for timeout_s"


def test_a_cause_that_nobody_knows_is_told_as_far_as_it_is_known(make: Callable[..., Group]) -> None:
    group = make()
    group.actors[0].say(failed(0, FailureKind.DISCONNECTED, LOST))
    group.actors[1].say(failed(1, FailureKind.DISCONNECTED, LOST))
    assert error_of(group).startswith("rank 0 of 3 on host0 lost contact with the others:\n(rank 1 on host1")


def test_the_nodes_of_lost_workers_are_noted_for_preemption(make: Callable[..., Group]) -> None:
    group = make()
    group.actors[1].die()
    with pytest.raises(TrainingFailed) as raised:
        group.real.next_event()
    assert raised.value.lost_nodes == ("node 1",)


def test_what_the_others_printed_last_is_kept(make: Callable[..., Group]) -> None:
    group = make()
    last = LogChunk(2, b"its last words\n")
    group.actors[2].replies["send_logs"] = lambda: group.actors[2].say(last)
    group.actors[0].say(LogChunk(0, b"before\n"), failed(0, FailureKind.RAISED, "ValueError: x"))
    error_of(group)
    assert group.real.take_logs() == [LogChunk(0, b"before\n"), last]


# -- malformed messages


@pytest.mark.parametrize("message", [None, b"\x80\x04.", ["Report"], {"index": 1}, 7, NeedsWorld(1)])
def test_a_message_of_no_known_kind_ends_the_trial_and_names_who_sent_it(
    make: Callable[..., Group], message: object
) -> None:
    group = make()
    group.actors[1].say(message)  # type: ignore[arg-type]
    assert error_of(group).startswith("received a malformed message from rank 1 on host1: ")


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\1\xc1", frame("finished"), b"\0\0\0\4\x93\x01\x02\x03"],
)
def test_a_malformed_message_ends_the_trial(make: Callable[..., Group], data: bytes) -> None:
    group = make(by_channel=True)
    group.launcher.rank_ends[0].send(data)
    assert error_of(group).startswith("received a malformed message on a rank's socket: ")


# -- anything


def random_life(actor: FakeActor, group: Group, rng: random.Random, sent: list[LogChunk]) -> str:
    """Plan what one rank does in its life; return how it ends."""
    at = 0.0
    for number in range(rng.randrange(4)):
        at += rng.uniform(0, 20)
        chunk = LogChunk(actor.rank, b"rank %d line %d\n" % (actor.rank, number))
        messages = [chunk, *([Report(number + 1, {"n": number})] if actor.rank == 0 else [])]
        group.clock.at(at, lambda messages=messages: actor.say(*messages))  # type: ignore[misc]
        sent.append(chunk)
    at += rng.uniform(0, 20)
    end = rng.choice(["finished"] * 6 + ["raised", "disconnected", "died", "silent"])
    do: dict[str, Callable[[], None]] = {
        "finished": lambda: actor.say(Finished(actor.rank)),
        "raised": lambda: actor.say(failed(actor.rank, FailureKind.RAISED, "ValueError: x")),
        "disconnected": lambda: actor.say(failed(actor.rank, FailureKind.DISCONNECTED, LOST)),
        "died": actor.die,
        "silent": actor.fall_silent,
    }
    group.clock.at(at, do[end])
    return end


@pytest.mark.parametrize("seed", range(150))
def test_whatever_ranks_do_the_trial_ends_in_time_with_an_end_that_is_so(
    make: Callable[..., Group], seed: int
) -> None:
    rng = random.Random(seed)
    group = make(rng.randrange(1, 6))
    sent: list[LogChunk] = []
    ends = [random_life(actor, group, rng, sent) for actor in group.actors]
    began, reports = group.clock.now, 0
    try:
        while not isinstance(event := group.real.next_event(), Finished):
            reports += 1
            assert event.index == reports
            group.clock.now += rng.choice([0.0, 0.1, 40.0])
            group.real.proceed(event.index, None)
        assert set(ends) == {"finished"}
        assert [each for rank in range(len(ends)) for each in sent if each.rank == rank] == sorted(
            group.real.take_logs(), key=lambda each: each.rank
        ), "nothing that was printed is lost"
    except TrainingFailed as error:
        first = str(error).splitlines()[0]
        verb = {
            "failed": "raised",
            "died": "died",
            "stopped responding": "silent",
            "lost contact": "disconnected",
        }
        (told,) = [end for text, end in verb.items() if text in first]
        rank = int(first.split()[1])
        assert ends[rank] == told, (first, ends)
        assert group.real.end_trial() == ["a rank failed"]
    assert group.clock.now - began < 4 * 40 + 4 * 20 + 2 * TIMEOUT_S + 10
