"""The world of one trial in the coordinator: its members, and how it is formed, broken and formed again.

If a rank dies, `lose` calls `policy.decide`. Either the trial fails (`failures`), or the world is broken on
the other ranks, each of which sends `NeedsWorld` when it has left (`record_left`). When all have,
`_form_next` makes the next world of them and of the workers that have started meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from horovod_tune.coordinator import failures as failure_texts
from horovod_tune.coordinator.backend_protocol import Launcher
from horovod_tune.coordinator.policy import TICK_S, Action, Fail, Limits, WorldStatus, backoff_s, decide
from horovod_tune.coordinator.slots import Slots
from horovod_tune.coordinator.workers import EventQueue, Worker, call_all, end_workers, replies_to
from horovod_tune.errors import StartFailed, death_text
from horovod_tune.messages import (
    Assignment,
    CheckpointPlace,
    Failed,
    FailureKind,
    NeedsWorld,
    Report,
    TrialRequest,
)
from horovod_tune.spec.trial_spec import PROCESS_START_FACTOR, start_timeout_s

# The most characters of a loss's cause in the reason of a change, which each report carries.
_CAUSE_LENGTH = 200


@dataclass
class _Change:
    """A change of the world that is in progress; ``left`` are the members that have left the world."""

    # By the monotonic clock: when it began, and when the last member was lost since.
    began: float
    waits_since: float
    # True if the ranks were asked to leave their world.
    was_offered: bool
    reasons: list[str] = field(default_factory=list)
    left: set[Worker] = field(default_factory=set)
    lost: list[Failed] = field(default_factory=list)
    # The last error with which a rank left or the next world could not be formed.
    error: str = ""
    # A rank that waited in a collective that not all ranks entered.
    stalled: Failed | None = None

    @property
    def world_broke(self) -> bool:
        """True if the world, or the attempt to form the next one, failed."""
        return bool(self.lost or self.error or not self.was_offered)


class World:
    """The members of a trial's world, which run later trials too, and the workers that will join it."""

    def __init__(self, launcher: Launcher, limits: Limits, events: EventQueue) -> None:
        self.members: list[Worker] = []
        self.limits = limits
        self.size = 0
        # The members with their ranks in the trial's first world.
        self._assigned: list[tuple[Worker, Assignment]] = []
        self._launcher = launcher
        self._events = events
        self.slots = Slots(launcher, limits)
        self.forget_trial()

    def forget_trial(self) -> None:
        self.number = 0
        # The ranks whose loss ends the trial.
        self.failures: list[Failed] = []
        self.lost_nodes: list[str] = []
        # Why the world changed, one text per change.
        self.changes: list[str] = []
        # How long the last change took, from the loss of the world to the first report of the next one.
        self.change_s = 0.0
        # The ranks whose training function has returned.
        self.returned: set[int] = set()
        self._change: _Change | None = None
        # None before and after the trial, when losses are only recorded.
        self._request: TrialRequest | None = None
        # What joining workers start from: the index of the last report taken, and the newest checkpoint.
        self.reports = 0
        # Reports that the trial has not taken yet.
        self._pending: list[Report] = []
        self.checkpoint: CheckpointPlace | None = None
        self._worlds_without_report = 0
        self._without_world_since: float | None = None
        self._forget_offers()

    def _forget_offers(self) -> None:
        self._others_were_ready = False
        self._offers, self._next_offer_s = 0, 0.0

    @property
    def running(self) -> set[int]:
        """The ranks whose training function runs."""
        return {rank for worker in self.members for rank in worker.running}

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each rank, by rank; empty until the workers have their ranks."""
        by_rank = {rank: worker.info.host for worker in self.members if worker.info for rank in worker.ranks}
        return dict(sorted(by_rank.items()))

    def create(self) -> None:
        """Start the workers, without waiting for them."""
        self.members = [Worker(actor, slot) for slot, actor in enumerate(self._launcher.create())]
        self._created = len(self.members)

    def form(self) -> None:
        """Wait until the workers have started, and assign the ranks of the trial's first world.

        Raises:
            StartFailed: workers did not start in time, or were placed on other hosts than requested.
        """
        timeout_s = self.limits.timeout_s
        while True:
            members = self.members
            try:
                descriptions = [worker.description for worker in members]
                times = PROCESS_START_FACTOR
                infos = call_all(members, descriptions, "to start", timeout_s=timeout_s, times=times)
                for worker, info in zip(members, infos, strict=True):
                    worker.info = info
                self._assigned = self._assign_ranks(members)
                return
            except StartFailed:
                if not self.limits.is_elastic:
                    raise
                calls = [worker.actor.describe.remote() for worker in members]
                replies = zip(members, replies_to(calls, self.limits.prompt_s), strict=True)
                lost = [worker for worker, reply in replies if isinstance(reply, RayError)]
                remaining = [each for each in members if each not in lost]
                if not lost or not self.limits.can_continue_with(len(remaining)):
                    raise
                self.members = remaining
                end_workers(lost)

    def _assign_ranks(self, workers: Sequence[Worker], **options: Any) -> list[tuple[Worker, Assignment]]:
        infos = [worker.info for worker in workers if worker.info is not None]
        assignments = self._launcher.assign([worker.actor for worker in workers], infos, **options)
        for worker, assignment in zip(workers, assignments, strict=True):
            worker.ranks = tuple(each.rank for each in assignment.rank_infos)
        self.size = sum(len(worker.ranks) for worker in workers)
        return list(zip(workers, assignments, strict=True))

    def _connect(self, workers: Sequence[Worker]) -> None:
        """Open the channels of workers on this host; ``workers`` are in the order of the assignments."""
        for number, channel in self._launcher.channels().items():
            self._events.add_channel(workers[number], channel)
        self._events.close_channels([each for each in workers if each not in self.members])  # lost meanwhile

    def begin(self, request: TrialRequest) -> None:
        """Start a trial's training function on every member, whose ranks `form` has assigned."""
        self._request, self.checkpoint = request, request.checkpoint
        members = list(self.members)
        self._events.close_channels(members)  # those of the trial before
        calls = [worker.actor.begin.remote(each, request) for worker, each in self._assigned]
        for worker in members:
            worker.running = set(worker.ranks)
        self._await(members, calls)
        self._connect(members)
        self.poll_all()
        self.slots.start_missing(self.members)

    def poll_all(self) -> None:
        for worker in self.members:
            if worker.running and not worker.is_polled:
                worker.poll(self._events, self.limits.heartbeat_s)

    def _await(self, workers: Sequence[Worker], calls: Sequence[Any], timeout_s: float | None = None) -> bool:
        """Wait for each worker's reply; those that do not reply in time are lost. Return True if none is."""
        if timeout_s is None:
            timeout_s = start_timeout_s(self.limits.timeout_s, len(workers))
        replies = replies_to(calls, timeout_s)
        for worker, reply in zip(workers, replies, strict=True):
            if isinstance(reply, GetTimeoutError):
                self.lose(worker, FailureKind.UNRESPONSIVE, f"did not reply within {timeout_s:g} s")
            elif isinstance(reply, RayError):
                self.lose(worker, FailureKind.DIED, death_text(reply))
        return not any(isinstance(reply, RayError) for reply in replies)

    def lose(self, worker: Worker, kind: FailureKind, text: str, *, actor_lives: bool = False) -> None:
        """Handle the loss of a worker: the trial fails, or continues without it.

        With ``actor_lives`` only its rank's process has ended, and it can start another one.
        """
        if worker not in self.members:
            self.slots.restart_later(worker)
            return
        info = worker.info
        assert info is not None, "a member has ranks"
        worker.running.clear()
        worker.is_polled = False
        self.lost_nodes.append(info.node_id)
        if not actor_lives:
            text = f"its training actor (process {info.pid}): {text}"
        lost = [Failed(rank, info.host, kind, text) for rank in worker.ranks]
        now = WorldStatus(len(self.members) - 1, lost=len(lost), has_returned=bool(self.returned))
        if self._request is None or isinstance(decide(now, self.limits), Fail):
            self._fail([*(self._change.lost if self._change is not None else []), *lost])
            return
        if actor_lives:
            self.members.remove(worker)
            self._events.close_channels([worker])
        else:
            self._end_members([worker], wait=False)  # its host may not respond
        change = self._change or self._begin_change()
        change.left.discard(worker)
        if not change.lost:
            change.reasons.clear()  # this loss is why others lost contact
        cause = text.partition("\n")[0][:_CAUSE_LENGTH]
        change.reasons.append(f"{worker.name} {failure_texts.VERBS[kind]}: {cause}")
        change.lost += lost
        change.waits_since = time.monotonic()
        self._break_world()
        self.slots.record_lost(worker, actor_lives=actor_lives)

    def _begin_change(self) -> _Change:
        now = time.monotonic()
        self._change = _Change(now, now, was_offered=self._offers > 0)
        if self._without_world_since is None:
            self._without_world_since = now
        # Once the world is broken, rank 0 leaves its report, and may delete the checkpoint's directory.
        self._pending.clear()
        return self._change

    def _break_world(self) -> None:
        self._launcher.abandon_world()
        for worker in self.members:
            worker.actor.break_world.remote(self.number)

    def _end_members(self, workers: Sequence[Worker], *, wait: bool = True) -> None:
        self.members = [worker for worker in self.members if worker not in workers]
        self._events.close_channels(workers)
        end_workers(workers, wait=wait)

    def record_left(self, worker: Worker, message: NeedsWorld) -> None:
        """Record that a worker's training function has left the world and waits for the next one."""
        change = self._change
        if change is None:
            change = self._begin_change()
            change.reasons.append(self._reason_of_leaving(worker))
            self._break_world()
        change.left.add(worker)
        change.error = message.error or change.error
        if message.stalled:
            assert worker.info is not None, "a member has ranks"
            host = worker.info.host
            change.stalled = Failed(message.rank, host, FailureKind.STALLED, message.stalled)

    def _reason_of_leaving(self, first: Worker) -> str:
        """Return the reason for a change without a loss; ``first`` is the first worker that left."""
        draining = ", ".join(worker.name for worker in self.members if self.slots.is_draining(worker))
        if draining:
            return f"the node of {draining} is draining"
        if any(map(self.slots.is_excess, self.members)):
            return f"a scheduler reduced the trial to {self.limits.max_workers} rank(s)"
        return "more workers join" if self._others_were_ready else f"{first.name} lost contact"

    @property
    def tick_s(self) -> float:
        """How long to listen before `advance` is called again."""
        is_busy = self._change is not None or self.slots.starting
        return TICK_S if is_busy else self.limits.heartbeat_s

    def advance(self, listening_since: float) -> None:
        """Treat workers with an overdue heartbeat as lost, then do what the policy decides."""
        for worker in list(self.members):
            limit_s = self.limits.prompt_s if worker.is_reply_requested else self.limits.timeout_s
            if worker.overdue_s(listening_since) > limit_s:
                source = "an immediate reply was requested" if worker.is_reply_requested else "timeout_s"
                self.lose(worker, FailureKind.UNRESPONSIVE, f"no heartbeat for {limit_s:g} s ({source})")
        if not self.limits.is_elastic or self.failures or self._request is None or not self.running:
            return
        if not self.returned:
            self.slots.replace_draining(self.members)
        ready = self.slots.ready(self.members)
        self._offer_change_if_due(bool(ready))
        if self._change is not None:
            self._continue(self._change, ready)

    def _continue(self, change: _Change, ready: Sequence[Worker]) -> None:
        now = WorldStatus(
            members=len(self.members),
            lost=len(change.lost),
            left=len(change.left),
            ready=len(ready),
            elapsed_s=time.monotonic() - change.began,
            waited_s=time.monotonic() - change.waits_since,
            has_returned=bool(self.returned),
            has_stalled=change.stalled is not None,
            worlds_without_report=self._worlds_without_report + change.world_broke,
        )
        match decide(now, self.limits):
            case Fail(reason=reason):
                if change.error and reason:
                    reason += f" The last error was: {change.error}"
                stalled = [change.stalled] if change.stalled is not None else []
                self._fail(change.lost or stalled, reason)
            case Action.REFORM:
                if self.slots.enough_remain(self.members, len(ready)):
                    leaving = [worker for worker in self.members if self.slots.must_leave(worker)]
                    self._end_members(leaving)
                    for worker in filter(self.slots.is_excess, leaving):
                        self._launcher.release_slot(worker.slot)
                self._forget_offers()
                self._form_next(change, ready)
            case Action.ABANDON:
                text = f"did not leave its broken world within timeout_s={self.limits.timeout_s:g} s"
                for worker in [each for each in self.members if each not in change.left]:
                    self.lose(worker, FailureKind.HUNG, text)
            case Action.WAIT:
                if time.monotonic() - change.began > 2 * TICK_S:
                    # A member that does not leave may be dead: it counts as lost if it does not reply soon.
                    for worker in self.members:
                        if worker not in change.left:
                            worker.request_reply(every_s=self.limits.prompt_s / 2)

    def _fail(self, lost: list[Failed], reason: str = "") -> None:
        """Fail the trial because of the ranks ``lost``; ``reason`` is added to the error."""
        hosts = self.hosts
        if not lost:
            early = self.returned & hosts.keys()
            lost = [failure_texts.returned_early(rank, hosts[rank], "a collective") for rank in early]
        if not lost:  # ranks lost contact, and none is known to be the cause
            rank, host = next(iter(hosts.items()))
            lost = [Failed(rank, host, FailureKind.DISCONNECTED, "")]
        if reason:
            lost = [replace(lost[0], traceback=f"{lost[0].traceback}\n{reason}".strip()), *lost[1:]]
        self.failures += lost
        if self._change is not None:
            self._change.lost = []

    def _form_next(self, change: _Change, joining: Sequence[Worker]) -> None:
        """Form the next world from the members, all of which have left the old one, and from ``joining``."""
        assert self._request is not None
        workers = [*self.members, *joining]
        assert workers[0].info is not None
        try:
            # The oldest member becomes rank 0: it has the last commit.
            assigned = self._assign_ranks(workers, first_node=workers[0].info.node_id)
        except StartFailed as error:
            change.error = str(error)
            change.reasons.append(change.error)
            calls = [worker.actor.describe.remote() for worker in workers]
            if self._await(workers, calls, self.limits.prompt_s):  # a host is unsuitable
                if joining:
                    self.slots.restart_later(joining[-1])  # and try without it
                else:
                    self._fail(change.lost, change.error)
            return
        self._worlds_without_report += change.world_broke
        self.number += 1
        self._change = None
        self.slots.record_joined(joining)
        self.members = list(workers)
        for worker in workers:
            worker.running = set(worker.ranks)
        request = replace(
            self._request, world_number=self.number, reports=self.reports, checkpoint=self.checkpoint
        )
        calls = [
            worker.actor.begin.remote(each, request)
            if worker in joining
            else worker.actor.rejoin.remote(each, self.number, request.reports, request.resources)
            for worker, each in assigned
        ]
        self._await(workers, calls)
        self._connect(workers)
        if self._change is not None:
            self._break_world()  # again: workers that had not begun ignored the first `break_world`
        self.poll_all()
        self.changes.append("; ".join(dict.fromkeys(change.reasons)))

    def record_report(self, report: Report) -> None:
        """Record a report, unless the world is changing: the function makes it again in the next one."""
        if self._change is None:
            self._pending.append(report)

    def take_report(self) -> Report | None:
        """Return the next report, which shows that this world works; None if there is none."""
        if not self._pending:
            return None
        report = self._pending.pop(0)
        self.reports, self._worlds_without_report = report.index, 0
        if self._without_world_since is not None:
            self.change_s = time.monotonic() - self._without_world_since
            self._without_world_since = None
        return report

    def _offer_change_if_due(self, are_ready: bool) -> None:
        """End this world at the next commit if workers are ready to join, or some must leave.

        The offer is repeated, since ranks that have just entered their world may have missed it.
        """
        if self._change is not None or self.returned:
            return
        must_leave = len(self.slots.remaining(self.members)) < len(self.members)
        if not (are_ready or (must_leave and self.slots.enough_remain(self.members))):
            return
        self._others_were_ready |= are_ready
        now = time.monotonic()
        if now < self._next_offer_s:
            return
        self._offers += 1
        self._next_offer_s = now + backoff_s(self._offers)
        for worker in self.members:
            worker.actor.offer_change.remote(self.number)

    def resize(self, workers: int, resources: bytes) -> bool:
        """Change the number of ranks at the next commit; False if the trial must restart instead.

        ``resources`` are its new resources, as in `TrialRequest`.
        """
        if not self.limits.is_elastic or self.failures or self.returned or not self.running:
            return False
        # Ray removes a placement group only as a whole, so no slot in the trial's own group can be released.
        if workers < self._created:
            return False
        if not self.first_reply("can_restore", timeout_s=self.limits.prompt_s):
            return False
        assert self._request is not None, "ranks run"
        self.limits = self.slots.limits = replace(self.limits, max_workers=workers)
        self._request = replace(self._request, resources=resources)
        self.slots.release_excess(self.members)
        self.slots.start_missing(self.members)
        self._offer_change_if_due(False)
        return True

    def first_reply(self, method: str, *, timeout_s: float) -> Any:
        """Call ``method`` on one member after another, ``timeout_s`` each; return the first reply or None."""
        for worker in self.members:
            try:
                return ray.get(getattr(worker.actor, method).remote(), timeout=timeout_s)
            except RayError:
                continue  # `advance` handles the loss
        return None

    def end_trial(self) -> None:
        """End a change in progress, whose lost ranks become failures; later losses are only recorded."""
        if self._change is not None:
            self.failures += self._change.lost
        self._request = self._change = None

    def close(self) -> None:
        """End every worker's process and wait until it is gone; may be called twice."""
        self.slots.end(self.slots.starting)
        members, self.members = self.members, []
        for worker in members:
            worker.is_polled = False  # its reply may arrive during the next trial
        self._events.close_channels(members)
        below = self._launcher.processes_below()
        end_workers(members, below=below, lost_nodes=self.lost_nodes)
        self._launcher.close()
