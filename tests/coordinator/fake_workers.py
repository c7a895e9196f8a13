"""Workers that do as a test says, below a real worker group: no Ray, no process, and a clock of their own.

Nothing here waits: where the group would, the clock moves on to the next thing that a test has planned, or to
the end of the wait. So a silence of a minute takes no time, and a test goes the same way on every machine.
"""

from __future__ import annotations

import inspect
import itertools
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from horovod_tune.channel.report_channel import CoordinatorChannel
from horovod_tune.coordinator.backend_protocol import WorkerActor
from horovod_tune.coordinator.worker_group import WorkerGroup
from horovod_tune.errors import TrainingFailed
from horovod_tune.messages import (
    Assignment,
    Failed,
    FailureKind,
    Message,
    ResetResult,
    TrialRequest,
    WorkerInfo,
    World,
)

TIMEOUT_S = 60.0
ORDER = TrialRequest("id", "name", "dir", "work", "experiment", {}, None)


class Clock:
    """Time as a test says; what is planned happens when it gets there."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._numbers = itertools.count()
        self._planned: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, seconds: float, do: Callable[[], None]) -> None:
        """Do something ``seconds`` from now."""
        self._planned.append((self.now + seconds, next(self._numbers), do))
        self._planned.sort(key=lambda each: each[:2])

    def move(self, seconds: float) -> bool:
        """Move to the next planned thing, at most by ``seconds``; whether it got there."""
        end = self.now + seconds
        if not self._planned or self._planned[0][0] > end:
            self.now = end
            return False
        when, _, do = self._planned.pop(0)
        self.now = max(self.now, when)
        do()
        return True


class Ref:
    """The answer to a call of an actor: there, or to come."""

    def __init__(self) -> None:
        self.answer: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self.answer


class FakeActor:
    """A training actor with one rank. It answers all calls at once, `poll` with what `say` is given."""

    protocol: type = WorkerActor

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: list[tuple[Any, ...]] = []
        self.is_dead = self.is_silent = False
        # What it answers to calls other than `poll`; those that are not named answer None.
        self.answers: dict[str, Any] = {
            "describe": WorkerInfo(f"node {rank}", "10.0.0.1", f"host{rank}", 100 + rank, 0.0),
            "reset": ResetResult((rank,)),
            "ping": 0,
            "awaited_ranks": {},
        }
        self._unsaid: list[Sequence[Message]] = []
        self._poll: Ref | None = None

    def __getattr__(self, name: str) -> Any:
        signature = inspect.signature(getattr(self.protocol, name))

        def remote(*args: Any) -> Ref:
            signature.bind(self, *args)
            self.calls.append((name, *args))
            ref = Ref()
            if self.is_dead:
                ref.answer.set_exception(ActorDiedError())
            elif name == "poll":
                assert self._poll is None, "it is asked twice"
                self._poll = ref
                self._answer_poll()
            elif not self.is_silent:
                answer = self.answers.get(name)
                try:
                    ref.answer.set_result(answer() if callable(answer) else answer)
                except ActorDiedError as error:
                    ref.answer.set_exception(error)
            return ref

        return type("Method", (), {"remote": staticmethod(remote)})

    def called(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    def say(self, *messages: Message) -> None:
        """Answer the poll of now, or the next one."""
        self._unsaid.append(messages)
        self._answer_poll()

    @property
    def can_speak(self) -> bool:
        """Whether what it says now arrives now."""
        return self._poll is not None and not self.is_silent

    def give_sign_of_life(self) -> None:
        if self._poll is not None:
            self.say()

    def die(self) -> None:
        self.is_dead = True
        if self._poll is not None:
            poll, self._poll = self._poll, None
            poll.answer.set_exception(ActorDiedError())

    def fall_silent(self) -> None:
        """Answer nothing any more, as a process that is stopped."""
        self.is_silent = True

    def wake_up(self) -> None:
        self.is_silent = False
        self._answer_poll()

    def _answer_poll(self) -> None:
        if self._poll is not None and self._unsaid and not self.is_silent:
            poll, self._poll = self._poll, None
            poll.answer.set_result(list(self._unsaid.pop(0)))


class FakeLauncher:
    """Starts fake actors, one a rank; with ``by_channel``, rank 0 has a channel."""

    def __init__(self, size: int, *, by_channel: bool) -> None:
        self.actors = [FakeActor(rank) for rank in range(size)]
        self.is_closed = False
        self.rank_ends: dict[int, socket.socket] = {}
        self._by_channel = by_channel

    def create(self) -> Sequence[Any]:
        return self.actors

    def assign(self, workers: Sequence[Any], facts: Sequence[WorkerInfo]) -> Sequence[Assignment]:
        size = len(workers)
        return [Assignment((World(rank, size, 0, 1, rank, size),)) for rank in range(size)]

    def channels(self) -> dict[int, CoordinatorChannel]:
        if not self._by_channel:
            return {}
        ours, self.rank_ends[0] = socket.socketpair()
        return {0: CoordinatorChannel(ours)}

    def processes_below(self) -> Sequence[WorkerInfo]:
        return []

    def close(self) -> None:
        self.is_closed = True
        for end in self.rank_ends.values():
            end.close()


class Group:
    """A worker group over fake workers."""

    def __init__(self, clock: Clock, size: int = 3, *, by_channel: bool = False) -> None:
        self.clock = clock
        self.launcher = FakeLauncher(size, by_channel=by_channel)
        self.actors = self.launcher.actors
        self.real = WorkerGroup(self.launcher, timeout_s=TIMEOUT_S)
        self._let_them_live()

    def _let_them_live(self) -> None:
        for actor in self.actors:
            actor.give_sign_of_life()
        self.clock.at(TIMEOUT_S / 4, self._let_them_live)


def failed(rank: int, kind: FailureKind, text: str) -> Failed:
    """Return what a rank that was lost says of itself."""
    return Failed(rank, f"host{rank}", kind, text)


def error_of(group: Group) -> str:
    """Return the error that the group's next event is."""
    with pytest.raises(TrainingFailed) as raised:
        group.real.next_event()
    return str(raised.value)
