"""What the coordinator knows of the current trial. Pure: no Ray, no clock, no processes.

Each method that takes an event (a worker's messages, a loss, the passing of time) changes the state and
returns the effects, in order, which `world` carries out. What a loss leads to is decided in `policy`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Generic, TypeVar

from horovod_tune.coordinator import failures as failure_texts
from horovod_tune.coordinator.policy import TICK_S, Action, Fail, Limits, WorldStatus, backoff_s, decide
from horovod_tune.coordinator.uneven_reports import UnevenReports
from horovod_tune.errors import TrainingFailed
from horovod_tune.messages import (
    AwaitedRanks,
    CheckpointPlace,
    Failed,
    FailureKind,
    Finished,
    LogChunk,
    LongWait,
    NeedsWorld,
    Report,
    WorkerInfo,
)

# The most characters of a loss's cause in the reason of a change, which each report carries.
_CAUSE_LENGTH = 200


@dataclass(eq=False)
class Member:
    """A worker, as far as decisions need it.

    Attributes:
        slot: the index of its slot in the trial.
        info: its node and process; None until they are known.
        ranks: empty until they are assigned.
        running: its ranks whose training function runs.
    """

    slot: int
    info: WorkerInfo | None = None
    ranks: tuple[int, ...] = ()
    running: set[int] = field(default_factory=set)

    @property
    def host(self) -> str:
        assert self.info is not None, "a member has ranks"
        return self.info.host

    @property
    def name(self) -> str:
        """The worker's name in errors: its ranks and host, if they are known."""
        if self.info is None:
            return "a training actor that has not started"
        if not self.ranks:
            return f"the training actor in process {self.info.pid} on {self.info.host}"
        first, last = self.ranks[0], self.ranks[-1]
        return f"{f'rank {first}' if first == last else f'ranks {first}-{last}'} on {self.info.host}"


M = TypeVar("M", bound=Member)


@dataclass
class Leaving:
    """Which workers must leave at the next commit: those of taken slots, and those on draining nodes."""

    limits: Limits
    draining: Collection[str] = frozenset()

    def is_excess(self, member: Member) -> bool:
        """Return True if a scheduler has taken the worker's slot from the trial."""
        return self.limits.is_elastic and member.slot >= self.limits.max_workers

    def is_draining(self, member: Member) -> bool:
        """Return True if the worker's node is about to be taken away."""
        return member.info is not None and member.info.node_id in self.draining

    def must_leave(self, member: Member) -> bool:
        return self.is_excess(member) or self.is_draining(member)

    def remaining(self, members: Iterable[M]) -> list[M]:
        return [member for member in members if not self.must_leave(member)]

    def enough_remain(self, members: Sequence[Member], joining: int = 0) -> bool:
        """Return True if enough workers remain without those that must leave.

        At least one must be a member, since only members have what was committed.
        """
        remaining = len(self.remaining(members))
        return remaining > 0 and self.limits.can_continue_with(remaining + joining)


class Do(Enum):
    """What `World.carry_out` does with an effect's members."""

    # Make the trial's members leave their world.
    BREAK_WORLD = auto()
    # Make all their reports return, since rank 0, for whose reports they wait, has returned.
    RELEASE_REPORTS = auto()
    # Request all their ranks' stacks.
    REQUEST_STACKS = auto()
    # Make their next commit end this world.
    OFFER_CHANGE = auto()
    # Form the next world from the trial's members, which have left the last one, and these.
    FORM_WORLD = auto()
    # Request immediate replies.
    REQUEST_REPLIES = auto()
    # End former members, and wait until their processes are gone; or do not wait for other hosts.
    END = auto()
    END_LOST = auto()
    # Close the channel of a former member whose rank has died; it takes part in the next world.
    REUSE = auto()
    # Start another worker in the slot of a former member.
    REPLACE = auto()
    # Start another one, later, for a worker that was lost before it joined a world.
    RESTART_LATER = auto()
    # Give back the resources of a slot that a scheduler has taken.
    RELEASE_SLOT = auto()


@dataclass(frozen=True)
class Effect:
    """What is to be done, for the trial's members or for ``members``."""

    do: Do
    members: tuple[Any, ...] = ()


@dataclass
class _Change:
    """A change of the world that is in progress; ``left`` are the members that have left the world."""

    # By the monotonic clock: when it began, and when the last member was lost since.
    began: float
    waits_since: float
    # True if the ranks were asked to leave their world.
    was_offered: bool
    reasons: list[str] = field(default_factory=list)
    left: set[Member] = field(default_factory=set)
    lost: list[Failed] = field(default_factory=list)
    # The last error with which a rank left or the next world could not be formed.
    error: str = ""
    # A rank that waited in a collective that not all ranks entered.
    stalled: Failed | None = None

    @property
    def world_broke(self) -> bool:
        """True if the world, or the attempt to form the next one, failed."""
        return bool(self.lost or self.error or not self.was_offered)


class TrialState(Generic[M]):
    """The state of one trial, over the workers that run it. Times are by the monotonic clock.

    >>> info = [WorkerInfo(f"node {n}", "10.0.0.1", "ab"[n], 100 + n, 0.0) for n in range(2)]
    >>> members = [Member(slot, info[slot], ranks=(slot,), running={slot}) for slot in range(2)]
    >>> state = TrialState(Leaving(Limits(60.0)), members)
    >>> state.size = 2
    >>> state.begin(None)
    >>> state.receive(members[0], [Report(1, {"loss": 0.5}, None)], now=1.0)
    []
    >>> state.take_report(now=1.0).metrics
    {'loss': 0.5}
    >>> state.lose(members[1], FailureKind.DIED, "killed", now=2.0)
    []
    >>> state.error(stacks={}, now=2.0)
    TrainingFailed('rank 1 of 2 on b died:\\nits training actor (process 101): killed')

    In an elastic trial, the others go on:

    >>> members[1].running = {1}
    >>> state = TrialState(Leaving(Limits(60.0, min_workers=1, max_workers=2)), members)
    >>> state.begin(None)
    >>> [each.do.name for each in state.lose(members[1], FailureKind.DIED, "killed", now=2.0)]
    ['END_LOST', 'BREAK_WORLD', 'REPLACE']
    >>> state.receive(members[0], [NeedsWorld(0)], now=2.1)
    []
    >>> [each.do.name for each in state.tick(now=2.2, ready=[])]
    ['FORM_WORLD']
    """

    def __init__(self, leaving: Leaving, members: Sequence[M] = ()) -> None:
        self.leaving = leaving
        self.members: list[M] = list(members)
        # True from the start of the training function until the trial ends: losses are only recorded else.
        self.is_active = False
        # The current world: its number in the trial, and its ranks.
        self.number = self.size = 0
        # The ranks whose loss ends the trial.
        self.failures: list[Failed] = []
        self.lost_nodes: list[str] = []
        # Why the world changed, one text per change.
        self.changes: list[str] = []
        # How long the last change took, from the loss of the world to the first report of the next one.
        self.change_s = 0.0
        # The ranks whose training function has returned, and those that had by the last poll of rank 0.
        self.returned: set[int] = set()
        self._returned_before: set[int] = set()
        self.change: _Change | None = None
        # What joining workers start from: the index of the last report taken, and the newest checkpoint.
        self.reports = 0
        self.checkpoint: CheckpointPlace | None = None
        # Reports that the trial has not taken yet.
        self._pending: list[Report] = []
        # What ranks have printed.
        self.logs: list[LogChunk] = []
        # The `names` of the last `AwaitedRanks` message.
        self._awaited: dict[int, str] = {}
        self._uneven = UnevenReports()
        self._worlds_without_report = 0
        self._without_world_since: float | None = None
        self._forget_offers()

    def _forget_offers(self) -> None:
        self._others_were_ready = False
        self._offers, self._next_offer_s = 0, 0.0

    @property
    def limits(self) -> Limits:
        return self.leaving.limits

    @property
    def running(self) -> set[int]:
        """The ranks whose training function runs."""
        return {rank for member in self.members for rank in member.running}

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each rank, by rank; empty until the workers have their ranks."""
        by_rank = {rank: member.host for member in self.members if member.info for rank in member.ranks}
        return dict(sorted(by_rank.items()))

    def begin(self, checkpoint: CheckpointPlace | None) -> None:
        """Start the trial on all members, from ``checkpoint``."""
        self.is_active, self.checkpoint = True, checkpoint
        for member in self.members:
            member.running = set(member.ranks)

    def end(self) -> None:
        """End a change in progress, whose lost ranks become failures; later losses are only recorded."""
        if self.change is not None:
            self.failures += self.change.lost
        self.is_active, self.change = False, None

    # A report's way.

    def receive(self, member: M, messages: Iterable[Any], now: float) -> list[Effect]:
        """Handle a worker's messages.

        Raises:
            TrainingFailed: a message is malformed.
        """
        effects = list[Effect]()
        for message in messages:
            match message:
                case Report():
                    self.record_report(message)
                case Finished(rank=rank):
                    member.running.discard(rank)
                    self.returned.add(rank)
                    effects += [Effect(Do.RELEASE_REPORTS)] if rank == 0 else []
                case Failed(kind=FailureKind.DIED | FailureKind.UNRESPONSIVE as kind, traceback=text) if (
                    self.limits.is_elastic
                ):
                    return effects + self.lose(member, kind, text, now, actor_lives=True)
                case Failed(rank=rank):
                    member.running.discard(rank)
                    self.failures.append(message)
                case LogChunk(rank=rank, stack=stack):
                    self.logs.append(message)
                    if stack:
                        self._uneven.record_stack(rank, stack, now)
                case LongWait():
                    self._uneven.record_wait(message)
                case AwaitedRanks(names=names):
                    self._record_awaited(names)
                case NeedsWorld() if self.limits.is_elastic:
                    self._uneven = UnevenReports()
                    effects += self._record_left(member, message, now)
                case _:
                    raise TrainingFailed(f"received a malformed message from {member.name}: {message!r:.200}")
        if 0 in member.ranks:
            self._returned_before = set(self.returned)
        return effects

    def record_report(self, report: Report) -> None:
        """Record a report, unless the world is changing: the function makes it again in the next one."""
        if self.change is None:
            self._pending.append(report)

    def take_report(self, now: float) -> Report | None:
        """Return the next report, which shows that this world works; None if there is none."""
        if not self._pending:
            return None
        report = self._pending.pop(0)
        self.reports, self._worlds_without_report = report.index, 0
        if self._without_world_since is not None:
            self.change_s = now - self._without_world_since
            self._without_world_since = None
        return report

    @property
    def has_uneven_reports(self) -> bool:
        """True if a rank waits in a report that rank 0 has not made."""
        return bool(self._uneven.ahead(self.reports))

    def check_reports(self, now: float) -> list[Effect]:
        """Fail the trial if a rank waits in a report that rank 0 never makes."""
        if not self._uneven.request_is_due(self.reports, now):
            return []
        if failure := self._uneven.find(self.reports, self.hosts, self.running, now):
            self.failures.append(failure)
        return [Effect(Do.REQUEST_STACKS)]

    def _record_awaited(self, names: dict[int, str]) -> None:
        self._awaited, hosts = names, self.hosts
        # The stall inspector does not say whether a missing rank has returned. Its message may be as old as
        # the previous poll, so only ranks that had returned then count.
        for rank in self._returned_before & names.keys() & hosts.keys():
            if self.running:
                self.failures.append(failure_texts.returned_early(rank, hosts[rank], names[rank]))

    # A loss's way.

    def lose(
        self, member: M, kind: FailureKind, text: str, now: float, *, actor_lives: bool = False
    ) -> list[Effect]:
        """Handle the loss of a worker: the trial fails, or continues without it.

        With ``actor_lives`` only its rank's process has ended, and it can start another one.
        """
        if member not in self.members:
            return [Effect(Do.RESTART_LATER, (member,))]
        info = member.info
        assert info is not None, "a member has ranks"
        member.running.clear()
        self.lost_nodes.append(info.node_id)
        if not actor_lives:
            text = f"its training actor (process {info.pid}): {text}"
        lost = [Failed(rank, info.host, kind, text) for rank in member.ranks]
        status = WorldStatus(len(self.members) - 1, lost=len(lost), has_returned=bool(self.returned))
        if not self.is_active or isinstance(decide(status, self.limits), Fail):
            self.fail([*(self.change.lost if self.change is not None else []), *lost])
            return []
        self.members.remove(member)
        change = self.change or self._begin_change(now)
        change.left.discard(member)
        if not change.lost:
            change.reasons.clear()  # this loss is why others lost contact
        cause = text.partition("\n")[0][:_CAUSE_LENGTH]
        change.reasons.append(f"{member.name} {failure_texts.VERBS[kind]}: {cause}")
        change.lost += lost
        change.waits_since = now
        left = [Effect(Do.REUSE if actor_lives else Do.END_LOST, (member,)), Effect(Do.BREAK_WORLD)]
        return left if actor_lives else [*left, Effect(Do.REPLACE, (member,))]

    def _begin_change(self, now: float) -> _Change:
        self.change = _Change(now, now, was_offered=self._offers > 0)
        if self._without_world_since is None:
            self._without_world_since = now
        # Once the world is broken, rank 0 leaves its report, and may delete the checkpoint's directory.
        self._pending.clear()
        return self.change

    def _record_left(self, member: M, message: NeedsWorld, now: float) -> list[Effect]:
        """Record that a worker's training function has left the world and waits for the next one."""
        effects, change = list[Effect](), self.change
        if change is None:
            change = self._begin_change(now)
            change.reasons.append(self._reason_of_leaving(member))
            effects.append(Effect(Do.BREAK_WORLD))
        change.left.add(member)
        change.error = message.error or change.error
        if message.stalled:
            change.stalled = Failed(message.rank, member.host, FailureKind.STALLED, message.stalled)
        return effects

    def _reason_of_leaving(self, first: M) -> str:
        """Return the reason for a change without a loss; ``first`` is the first worker that left."""
        draining = ", ".join(member.name for member in self.members if self.leaving.is_draining(member))
        if draining:
            return f"the node of {draining} is draining"
        if any(map(self.leaving.is_excess, self.members)):
            return f"a scheduler reduced the trial to {self.limits.max_workers} rank(s)"
        return "more workers join" if self._others_were_ready else f"{first.name} lost contact"

    @property
    def may_change(self) -> bool:
        """True if the world may change: the trial is elastic, and runs."""
        return self.limits.is_elastic and self.is_active and not self.failures and bool(self.running)

    def tick(self, now: float, ready: Sequence[M]) -> list[Effect]:
        """Offer or continue a change; ``ready`` are the workers that wait to join. Only if `may_change`."""
        if self.change is None:
            return self.offer_change_if_due(bool(ready), now)
        change = self.change
        status = WorldStatus(
            members=len(self.members),
            lost=len(change.lost),
            left=len(change.left),
            ready=len(ready),
            elapsed_s=now - change.began,
            waited_s=now - change.waits_since,
            has_returned=bool(self.returned),
            has_stalled=change.stalled is not None,
            worlds_without_report=self._worlds_without_report + change.world_broke,
        )
        staying = [member for member in self.members if member not in change.left]
        match decide(status, self.limits):
            case Fail(reason=reason):
                if change.error and reason:
                    reason += f" The last error was: {change.error}"
                stalled = [change.stalled] if change.stalled is not None else []
                self.fail(change.lost or stalled, reason)
            case Action.REFORM:
                return [*self._end_leaving(len(ready)), Effect(Do.FORM_WORLD, tuple(ready))]
            case Action.ABANDON:
                text = f"did not leave its broken world within timeout_s={self.limits.timeout_s:g} s"
                effects = list[Effect]()
                for member in staying:
                    effects += self.lose(member, FailureKind.HUNG, text, now)
                return effects
            case Action.WAIT:
                if now - change.began > 2 * TICK_S:
                    # A member that does not leave may be dead: it counts as lost if it does not reply soon.
                    return [Effect(Do.REQUEST_REPLIES, tuple(staying))]
        return []

    def _end_leaving(self, ready: int) -> list[Effect]:
        self._forget_offers()
        leaving = [member for member in self.members if self.leaving.must_leave(member)]
        if not leaving or not self.leaving.enough_remain(self.members, ready):
            return []
        self.members = self.leaving.remaining(self.members)
        excess = filter(self.leaving.is_excess, leaving)
        return [Effect(Do.END, tuple(leaving)), Effect(Do.RELEASE_SLOT, tuple(excess))]

    def record_unformed(self, error: str) -> None:
        """Record that the next world could not be formed."""
        assert self.change is not None
        self.change.error = error
        self.change.reasons.append(error)

    def fail_change(self) -> None:
        """Fail the trial with the error of `record_unformed`, for which no host is to blame."""
        assert self.change is not None
        self.fail(self.change.lost, self.change.error)

    def record_formed(self, members: Sequence[M]) -> None:
        """Record that ``members``, which have their ranks, form the next world."""
        assert self.change is not None
        self._worlds_without_report += self.change.world_broke
        self.number += 1
        self.changes.append("; ".join(dict.fromkeys(self.change.reasons)))
        self.change = None
        self.members = list(members)
        for member in members:
            member.running = set(member.ranks)

    def offer_change_if_due(self, are_ready: bool, now: float) -> list[Effect]:
        """End this world at the next commit if workers are ready to join, or some must leave.

        The offer is repeated, since ranks that have just entered their world may have missed it.
        """
        if self.change is not None or self.returned:
            return []
        must_leave = len(self.leaving.remaining(self.members)) < len(self.members)
        if not (are_ready or (must_leave and self.leaving.enough_remain(self.members))):
            return []
        self._others_were_ready |= are_ready
        if now < self._next_offer_s:
            return []
        self._offers += 1
        self._next_offer_s = now + backoff_s(self._offers)
        return [Effect(Do.OFFER_CHANGE)]

    # The error.

    def fail(self, lost: Sequence[Failed], reason: str = "") -> None:
        """Fail the trial because of the ranks ``lost``; ``reason`` is added to the error."""
        hosts, lost = self.hosts, list(lost)
        if not lost:
            early = self.returned & hosts.keys()
            lost = [failure_texts.returned_early(rank, hosts[rank], "a collective") for rank in early]
        if not lost:  # ranks lost contact, and none is known to be the cause
            rank, host = next(iter(hosts.items()))
            lost = [Failed(rank, host, FailureKind.DISCONNECTED, "")]
        if reason:
            lost = [replace(lost[0], traceback=f"{lost[0].traceback}\n{reason}".strip()), *lost[1:]]
        self.failures += lost
        if self.change is not None:
            self.change.lost = []

    def silent(self, stacks: Mapping[int, str]) -> list[M]:
        """Return the members that run, but whose ranks are not in ``stacks``, the replies to a request."""
        return [each for each in self.members if each.running and stacks.keys().isdisjoint(each.ranks)]

    def error(self, stacks: Mapping[int, str], now: float) -> TrainingFailed:
        """Return the error of a trial that has failed.

        Args:
            stacks: the stack of each rank that has replied since, or an empty text.
        """
        needs_cause = failure_texts.needs_cause(self.failures)
        early = self.returned & self.hosts.keys() if needs_cause else set()
        # The world ends with the process of a rank that has returned.
        hosts, waiting = self.hosts, list(self.failures)
        self.failures += [
            failure_texts.returned_early(rank, hosts[rank], "a collective", waiting) for rank in early
        ]
        if any(each.kind is FailureKind.STALLED for each in self.failures):
            ahead = self._uneven.failure(self.reports, hosts)
            self.failures += [ahead] if ahead is not None else []
        if failure_texts.needs_cause(self.failures):
            text = f"no reply for {self.limits.prompt_s:g} s"
            for member in self.silent(stacks):
                self.lose(member, FailureKind.UNRESPONSIVE, text, now)
        found = failure_texts.add_awaited_ranks(
            self.failures,
            self._awaited,
            hosts,
            running=self.running,
            returned=self.returned,
            stacks=stacks,
        )
        error = TrainingFailed(failure_texts.explain(found, world_size=self.size))
        error.lost_nodes = tuple(self.lost_nodes)
        return error
