"""Simulated workers for a real worker group: no Ray, no processes, and a simulated clock.

Nothing here waits: where the group would, the clock advances to the next call that a test has scheduled, or
to the end of the wait. So a timeout of a minute takes no time, and tests are deterministic.
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

from horovod_tune.actors.ranks import assign_ranks
from horovod_tune.channel.report_channel import CoordinatorChannel
from horovod_tune.coordinator.backend_protocol import WorkerActor
from horovod_tune.coordinator.policy import Limits
from horovod_tune.coordinator.worker_group import WorkerGroup
from horovod_tune.errors import StartFailed, TrainingFailed
from horovod_tune.messages import (
    Assignment,
    Failed,
    FailureKind,
    Finished,
    LogChunk,
    Message,
    NeedsWorld,
    Report,
    TrialRequest,
    WorkerInfo,
)

TIMEOUT_S = 60.0
# How long a trial with fewer than min_workers waits for others.
WAIT_S = 30.0
REQUEST = TrialRequest("id", "name", "dir", "work", "experiment", b"", None)


class Clock:
    """A simulated clock that runs scheduled calls when their time comes."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._numbers = itertools.count()
        self._scheduled: list[tuple[float, int, Callable[[], None]]] = []

    def call_later(self, seconds: float, do: Callable[[], None]) -> None:
        """Schedule ``do()`` in ``seconds``."""
        self._scheduled.append((self.now + seconds, next(self._numbers), do))
        self._scheduled.sort(key=lambda each: each[:2])

    def advance(self, seconds: float) -> bool:
        """Advance to the next scheduled call, at most by ``seconds``; return True if a call was run."""
        end = self.now + seconds
        if not self._scheduled or self._scheduled[0][0] > end:
            self.now = end
            return False
        when, _, do = self._scheduled.pop(0)
        self.now = max(self.now, when)
        do()
        return True


class Ref:
    """Stands for the object reference that a call of an actor returns."""

    def __init__(self) -> None:
        self.reply: Future[Any] = Future()

    def future(self) -> Future[Any]:
        return self.reply


class FakeActor:
    """A training actor with one rank. It replies to calls at once, except to `poll`: see `reply_to_poll`.

    In an elastic trial it leaves its world as soon as `break_world` or `offer_change` is called.
    """

    def __init__(self, number: int, launcher: FakeLauncher, slot: int, *, node: str = "") -> None:
        self.rank, self.slot = number, slot
        self.calls: list[tuple[Any, ...]] = []
        self.is_dead = self.is_suspended = self.has_left = False
        node = node or f"node {slot // launcher.slots_per_host}"
        # The replies to calls other than `poll`, or functions that return them; the default is None.
        self.replies: dict[str, Any] = {
            "describe": WorkerInfo(node, "10.0.0.1", f"host{node.split()[-1]}", 100 + number, 0.0),
            "end_trial": ([LogChunk(number, b"")], ""),
            "reply_now": lambda: self.reply_to_poll(LogChunk(self.rank, b"")),
            "break_world": self.leave_world,
            "offer_change": self.leave_world,
            "rejoin": self.join_world,
            "can_restore": True,
        }
        self._launcher = launcher
        self._queued_replies: list[Sequence[Message]] = []
        self._poll: Ref | None = None
        # The calls that it got while it was suspended.
        self._unanswered: list[Ref] = []

    def __getattr__(self, name: str) -> Any:
        signature = inspect.signature(getattr(WorkerActor, name))

        def remote(*args: Any) -> Ref:
            signature.bind(self, *args)
            self.calls.append((name, *args))
            ref = Ref()
            if self.is_dead:
                ref.reply.set_exception(ActorDiedError())
            elif name == "poll":
                assert self._poll is None, "polled twice at once"
                self._poll = ref
                self._send_reply()
            elif not self.is_suspended:
                reply = self.replies.get(name)
                try:
                    ref.reply.set_result(reply() if callable(reply) else reply)
                except ActorDiedError as error:
                    ref.reply.set_exception(error)
            else:
                self._unanswered.append(ref)
            return ref

        return type("Method", (), {"remote": staticmethod(remote)})

    def called(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]

    def reply_to_poll(self, *messages: Message) -> None:
        """Reply to the current poll, or to the next one."""
        self._queued_replies.append(messages)
        self._send_reply()

    @property
    def can_reply(self) -> bool:
        """Return True if a reply would be received at once."""
        return self._poll is not None and not self.is_suspended

    def send_heartbeat(self) -> None:
        if self._poll is not None:
            self.reply_to_poll()

    def leave_world(self) -> None:
        if not self.has_left:
            self.has_left = True
            self.reply_to_poll(NeedsWorld(self.rank))
            self._launcher.count_event("leave")

    def join_world(self) -> None:
        self.has_left = False
        self._launcher.count_event("rejoin")

    @property
    def resources(self) -> bytes:
        """The resources of the trial in the latest world."""
        name, *arguments = [call for call in self.calls if call[0] in ("begin", "rejoin")][-1]
        return arguments[1].resources if name == "begin" else arguments[3]

    def die(self) -> None:
        self.is_dead = True
        self._launcher.alive.discard(self)
        waiting = [ref for ref in (self._poll, *self._unanswered) if ref is not None]
        self._poll, self._unanswered = None, []
        for ref in waiting:
            ref.reply.set_exception(ActorDiedError())

    def kill(self) -> None:
        """Record that the coordinator killed the actor."""
        self._launcher.alive.discard(self)
        self.calls.append(("kill",))

    def suspend(self) -> None:
        """Send no replies until `resume`, like a process that got SIGSTOP."""
        self.is_suspended = True

    def resume(self) -> None:
        self.is_suspended = False
        self._send_reply()

    def _send_reply(self) -> None:
        if self._poll is not None and self._queued_replies and not self.is_suspended:
            poll, self._poll = self._poll, None
            poll.reply.set_result(list(self._queued_replies.pop(0)))


Prepare = Callable[[list[FakeActor]], None]


def do_nothing(actors: list[FakeActor]) -> None:
    pass


class FakeLauncher:
    """Starts fake actors at once, unless `cluster_is_full`; ranks are consecutive on each host.

    With ``by_channel``, rank 0 has a channel.
    """

    def __init__(
        self, size: int, *, slots_per_host: int = 1, cluster_is_full: bool = False, by_channel: bool = False
    ) -> None:
        self.slots_per_host, self.cluster_is_full = slots_per_host, cluster_is_full
        self.is_closed, self._by_channel = False, by_channel
        self.rank_ends: dict[int, socket.socket] = {}
        self.all_actors: list[FakeActor] = []
        self.alive: set[FakeActor] = set()
        self._size = size
        self.world = self.start()
        # Called with the next actor that is created, and with every one.
        self.on_create: Prepare = do_nothing
        self.on_every_create: Prepare = do_nothing
        self.abandoned, self.released = 0, list[int]()
        self.draining: set[str] = set()
        # Slots whose actors are on the spare node.
        self.moved: set[int] = set()
        # After how many calls of leave_world ("leave") or rejoin the actor in the last slot dies.
        self.dies_after: dict[str, int] = {}

    def start(self) -> list[FakeActor]:
        """Start the actors of all slots, which `create` returns."""
        self.actors = [self._start(slot) for slot in range(self._size)]
        return list(self.actors)

    def create(self) -> Sequence[Any]:
        return self.actors

    def _start(self, slot: int, **where: Any) -> FakeActor:
        actor = FakeActor(len(self.all_actors), self, slot, **where)
        self.all_actors.append(actor)
        self.alive.add(actor)
        return actor

    def count_event(self, event: str) -> None:
        if event in self.dies_after:
            self.dies_after[event] -= 1
            if self.dies_after[event] == 0:
                del self.dies_after[event]
                max(self.alive, key=lambda actor: (actor.slot, actor.rank)).die()

    def create_one(self, slot: int, *, elsewhere: bool = False) -> FakeActor:
        if elsewhere:
            self.moved.add(slot)
        actor = self._start(slot, **({"node": "node spare"} if slot in self.moved else {}))
        actor.is_suspended = self.cluster_is_full
        on_create, self.on_create = self.on_create, do_nothing
        on_create([actor])
        self.on_every_create([actor])
        return actor

    def abandon_world(self) -> None:
        self.abandoned += 1

    def release_slot(self, slot: int) -> None:
        self.released.append(slot)
        self.moved.discard(slot)

    def assign(
        self, workers: Sequence[Any], infos: Sequence[WorkerInfo], *, first_node: str | None = None
    ) -> Sequence[Assignment]:
        if any(actor.is_dead for actor in workers):
            raise StartFailed("rank 0 could not open a TCPStore: an actor has died")
        rank_infos = assign_ranks([each.node_id for each in infos], first_node=first_node or "node 0")
        for actor, rank_info in zip(workers, rank_infos, strict=True):
            actor.rank = rank_info.rank
        self.world = sorted(workers, key=lambda actor: actor.rank)
        return [Assignment((each,)) for each in rank_infos]

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


class FakeTrial:
    """A trial of a real worker group over fake workers; elastic if ``min_workers`` is given.

    ``options`` are those of `FakeLauncher`.
    """

    def __init__(
        self,
        clock: Clock,
        size: int = 3,
        *,
        min_workers: int | None = None,
        max_workers: int = 0,
        **options: Any,
    ) -> None:
        self.clock, self.reports = clock, 0
        self.launcher = FakeLauncher(size, **options)
        self.group = WorkerGroup(self.launcher, Limits(TIMEOUT_S, min_workers, max_workers, WAIT_S))
        self._send_heartbeats()

    def _send_heartbeats(self) -> None:
        for actor in self.launcher.all_actors:
            actor.send_heartbeat()
        self.clock.call_later(TIMEOUT_S / 4, self._send_heartbeats)

    @property
    def actors(self) -> list[FakeActor]:
        """The actors that the trial starts with, by slot."""
        return self.launcher.actors

    @property
    def world(self) -> list[FakeActor]:
        """The actors of the latest world, by rank."""
        return self.launcher.world

    @property
    def calls(self) -> int:
        """The number of calls of all actors."""
        return sum(len(actor.calls) for actor in self.launcher.all_actors)

    @property
    def is_settled(self) -> bool:
        """Return True if the world consists of exactly the live actors."""
        members = {worker.actor for worker in self.group.state.members}
        return self.launcher.alive == members and not any(actor.has_left for actor in members)

    def report_in(self, seconds: float) -> None:
        """Report from the actor that is rank 0 then, or as soon as it can reply and is in a world."""

        def report() -> None:
            if self.world[0].can_reply and not self.world[0].has_left:
                self.reports += 1
                self.world[0].reply_to_poll(Report(self.reports, {"size": len(self.world)}))
            else:
                self.clock.call_later(1.0, report)

        self.clock.call_later(seconds, report)

    def next_report(self) -> Report:
        self.report_in(20.0)
        event = self.group.next_event()
        assert isinstance(event, Report)
        return event

    def settle(self) -> None:
        """Report until all live actors are in one world."""
        end = self.reports + 50
        while not self.is_settled:
            assert self.reports < end, "the live actors form no world"
            self.next_report()

    def send(self, rank: int, *messages: Message, after_s: float = 0.0) -> None:
        """Send messages of one of the first actors, in its reply to a poll, in ``after_s`` seconds."""
        self.clock.call_later(after_s, lambda: self.actors[rank].reply_to_poll(*messages))

    def finish(self, *, after_s: float = 0.0) -> None:
        """Make the function return on every rank: on rank 0 now, on the others in ``after_s`` seconds."""
        for rank in range(len(self.actors)):
            self.send(rank, Finished(rank), after_s=after_s if rank else 0.0)
        assert self.group.next_event() == Finished(0)

    def error(self) -> str:
        """Return the text of the error that the group raises next."""
        with pytest.raises(TrainingFailed) as raised:
            self.group.next_event()
        return str(raised.value)


def failed(rank: int, kind: FailureKind, text: str) -> Failed:
    """Return the message with which a rank reports its failure."""
    return Failed(rank, f"host{rank}", kind, text)
