"""How long a worker may be silent follows from how fast the others answer."""

from __future__ import annotations

from typing import Any

import pytest
from fake_workers import Clock, FakeActor, Ref
from ray.exceptions import ActorDiedError

from horovod_tune.coordinator.signs_of_life import LEAST_SILENCE_S, MOST_SILENCE_S, SignsOfLife

TICK_S = 0.1


class LateActor(FakeActor):
    """Answers a `ping` after some seconds, or never."""

    def __init__(self, clock: Clock, after_s: float | None, error: Exception | None = None) -> None:
        super().__init__(0)
        self.ref = Ref()
        if after_s is not None:
            answer = self.ref.answer
            clock.at(after_s, lambda: answer.set_exception(error) if error else answer.set_result(0))

    def __getattr__(self, name: str) -> Any:
        assert name == "ping"
        return type("Method", (), {"remote": staticmethod(lambda: self.ref)})


class LateWorker:
    def __init__(self, actor: LateActor) -> None:
        self.actor = actor


def silent_after(clock: Clock, *answers_s: float | None) -> tuple[float, list[int]]:
    """Ask workers that answer after so many seconds; return when some were given up, and which."""
    workers: list[Any] = [LateWorker(LateActor(clock, each)) for each in answers_s]
    began, signs = clock.now, SignsOfLife(workers)
    while not signs.are_all_there:
        clock.move(TICK_S)
        silent, dead = signs.look()
        assert not dead
        if silent:
            assert signs.are_all_there and signs.look() == ([], [])
            return clock.now - began, [workers.index(worker) for worker in silent]
    return clock.now - began, []


def test_where_the_others_answer_at_once_a_silent_one_is_soon_given_up(clock: Clock) -> None:
    when, silent = silent_after(clock, 0.01, None, 0.02)
    assert silent == [1] and LEAST_SILENCE_S < when < 2.5


@pytest.mark.parametrize(("others_s", "its_s"), [(1.0, 4.5), (0.5, 3.0)])
def test_where_the_others_are_slow_one_that_is_slower_still_is_not(
    clock: Clock, others_s: float, its_s: float
) -> None:
    assert silent_after(clock, others_s, its_s)[1] == []


def test_where_nobody_answers_all_are_waited_for_longest(clock: Clock) -> None:
    when, silent = silent_after(clock, None, None)
    assert silent == [0, 1] and MOST_SILENCE_S < when <= MOST_SILENCE_S + 2 * TICK_S


def test_one_that_has_died_is_told_at_once_and_says_nothing_of_the_others(clock: Clock) -> None:
    workers: list[Any] = [
        LateWorker(LateActor(clock, 0.0, ActorDiedError())),
        LateWorker(LateActor(clock, 3.0)),
    ]
    signs = SignsOfLife(workers)
    clock.move(TICK_S)
    silent, ((worker, error),) = signs.look()
    assert silent == [] and worker is workers[0] and isinstance(error, ActorDiedError)
    clock.move(3.0)
    assert signs.look() == ([], []) and signs.are_all_there
