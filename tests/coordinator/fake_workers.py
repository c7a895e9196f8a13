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
from dataclasses import replace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from horovod_tune.actors.ranks import assign_ranks
from horovod_tune.actors.training_actor import TrainingActor
from horovod_tune.channel.report_channel import CoordinatorChannel
from horovod_tune.coordinator.backend_protocol import WorkerActor
from horovod_tune.coordinator.policy import Limits
from horovod_tune.coordinator.worker_group import WorkerGroup
from horovod_tune.errors import StartFailed, TrainingFailed
from horovod_tune.messages import (
    Assignment,
    Failed,
    FailureKind,
    LogChunk,
    Message,
    NeedsWorld,
    RankInfo,
    Report,
    ResetResult,
    TrialRequest,
    WorkerInfo,
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
        self.replies: dict[str, Any] = {
            "describe": WorkerInfo(f"node {rank}", "10.0.0.1", f"host{rank}", 100 + rank, 0.0),
            "reset": ResetResult((rank,)),
            # A rank that has printed nothing says so.
            "send_logs": lambda: self.say(LogChunk(rank, b"")),
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
                answer = self.replies.get(name)
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
        """Return True if what it says now arrives now."""
        return self._poll is not None and not self.is_silent

    def give_sign_of_life(self) -> None:
        if self._poll is not None:
            self.say()

    def die(self) -> None:
        self.is_dead = True
        if self._poll is not None:
            poll, self._poll = self._poll, None
            poll.answer.set_exception(ActorDiedError())

    def end(self) -> None:
        """Be killed by the coordinator."""
        self.calls.append(("killed",))

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
        return [Assignment((RankInfo(rank, size, 0, 1, rank, size),)) for rank in range(size)]

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
        self.real = WorkerGroup(self.launcher, Limits(TIMEOUT_S))
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


# How long fewer workers than min_workers wait for others.
WAIT_S = 30.0


class ElasticActor(FakeActor):
    """Leaves its world as soon as it is asked to, and at once if there is room for more ranks."""

    protocol = TrainingActor

    def __init__(self, number: int, launcher: ElasticLauncher, slot: int, *, node: str = "") -> None:
        super().__init__(number)
        self._launcher, self.slot = launcher, slot
        self.has_left = False
        node = node or launcher.node_of(slot)
        self.replies["describe"] = WorkerInfo(node, "10.0.0.1", f"host{node.split()[-1]}", 100 + number, 0.0)
        for what in ("break_world", "offer_change"):
            self.replies[what] = self.leave
        self.replies["rejoin"] = self.enter
        self.replies["can_restore"] = True

    def leave(self) -> None:
        if not self.has_left:
            self.has_left = True
            self.say(NeedsWorld(self.rank))
            self._launcher.doom("leave")

    def enter(self) -> None:
        self.has_left = False
        self._launcher.doom("rejoin")

    def die(self) -> None:
        self._launcher.alive.discard(self)
        super().die()

    def end(self) -> None:
        self._launcher.alive.discard(self)
        super().end()

    @property
    def resources(self) -> bytes:
        """What the trial's function sees of its resources in the newest world."""
        calls = [call for call in self.calls if call[0] in ("begin", "rejoin")]
        return calls[-1][1].resources if calls[-1][0] == "begin" else calls[-1][4]


class ElasticLauncher(FakeLauncher):
    """Starts an actor whenever it is asked, unless `is_full`; ranks go by host, the first worker's first."""

    def __init__(self, size: int, *, slots_per_host: int = 1) -> None:
        super().__init__(0, by_channel=False)
        self.slots_per_host = slots_per_host
        self.everybody: list[ElasticActor] = []
        self.alive: set[ElasticActor] = set()
        self.actors: list[Any] = [self._start(slot) for slot in range(size)]
        self.world = list(self.actors)
        self.is_full = False
        # What is done to the next one that is created, or to each.
        self.next_one: Callable[[list[ElasticActor]], None] = lambda actors: None
        self.again = False
        self.abandoned = 0
        self.size, self.released = size, list[int]()
        self.draining: set[str] = set()
        # After how many times that ranks leave or rejoin the one in the last slot dies.
        self.doomed: dict[str, int] = {}

    def node_of(self, slot: int) -> str:
        return f"node {slot // self.slots_per_host}"

    def _start(self, slot: int, **where: Any) -> ElasticActor:
        actor = ElasticActor(len(self.everybody), self, slot, **where)
        self.everybody.append(actor)
        self.alive.add(actor)
        return actor

    def doom(self, event: str) -> None:
        if event in self.doomed:
            self.doomed[event] -= 1
            if self.doomed[event] == 0:
                del self.doomed[event]
                max(self.alive, key=lambda actor: (actor.slot, actor.rank)).die()

    def create_one(self, slot: int, *, elsewhere: bool = False, again: bool = False) -> ElasticActor:
        actor = self._start(slot, **({"node": "node spare"} if elsewhere else {}))
        actor.is_silent = self.is_full
        prepare = self.next_one
        if not self.again:
            self.next_one = lambda actors: None
        prepare([actor])
        return actor

    def abandon_world(self) -> None:
        self.abandoned += 1

    @property
    def placed_workers(self) -> int:
        return self.size

    def release_slot(self, slot: int) -> None:
        self.released.append(slot)

    def assign(
        self, workers: Sequence[Any], facts: Sequence[WorkerInfo], *, first_node: str | None = None
    ) -> Sequence[Assignment]:
        if any(actor.is_dead for actor in workers):
            raise StartFailed("could not read the network interfaces of a host: an actor has died")
        rank_infos = assign_ranks([each.node_id for each in facts], first_node=first_node or "node 0")
        for actor, rank_info in zip(workers, rank_infos, strict=True):
            actor.rank = rank_info.rank
        self.world = sorted(workers, key=lambda actor: actor.rank)
        return [Assignment((each,)) for each in rank_infos]


class Elastic:
    """A trial of an elastic group."""

    def __init__(
        self,
        clock: Clock,
        size: int,
        *,
        least: int,
        most: int,
        is_full: bool = False,
        slots_per_host: int = 1,
        before: Callable[[list[ElasticActor]], None] = lambda actors: None,
    ) -> None:
        self.clock, self.reports = clock, 0
        self.launcher = ElasticLauncher(size, slots_per_host=slots_per_host)
        self.launcher.is_full = is_full
        self.group = WorkerGroup(
            self.launcher,
            Limits(TIMEOUT_S, least, most, WAIT_S),
            draining_nodes=lambda: set(self.launcher.draining),
        )
        before(self.launcher.everybody)
        self.group.begin(replace(ORDER, function=b"train"))
        self._let_them_live()

    def _let_them_live(self) -> None:
        for actor in self.launcher.everybody:
            actor.give_sign_of_life()
        self.clock.at(TIMEOUT_S / 4, self._let_them_live)

    @property
    def world(self) -> list[ElasticActor]:
        return self.launcher.world

    @property
    def calls(self) -> int:
        """How many calls of actors there were."""
        return sum(len(actor.calls) for actor in self.launcher.everybody)

    @property
    def is_settled(self) -> bool:
        """Return True if every rank that lives is in one world, in which none is that does not."""
        members = {worker.actor for worker in self.group.workers}
        return self.launcher.alive == members and not any(actor.has_left for actor in members)

    def report_in(self, seconds: float) -> None:
        """Let whoever is rank 0 by then report, or later if nobody can."""

        def report() -> None:
            if self.world[0].can_speak:
                self.reports += 1
                self.world[0].say(Report(self.reports, {"size": len(self.world)}))
            else:
                self.clock.at(1.0, report)

        self.clock.at(seconds, report)

    def next_report(self) -> Report:
        self.report_in(20.0)
        event = self.group.next_event()
        assert isinstance(event, Report)
        self.group.proceed(event.index, None)
        return event

    def settle(self) -> None:
        """Train until all ranks that live are in one world."""
        end = self.reports + 50
        while not self.is_settled:
            assert self.reports < end, "no world of all ranks is formed"
            self.next_report()
