"""The workers of a trial: starts them, forms worlds of them, and carries out what `trial_state` decides.

If a rank dies, either the trial fails, or the world is broken on the other ranks, each of which sends
`NeedsWorld` when it has left. When all have, `_form_next` makes the next world of them and of the workers
that have started meanwhile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from horovod_tune.coordinator.backend_protocol import Launcher
from horovod_tune.coordinator.policy import TICK_S, Limits
from horovod_tune.coordinator.slots import Slots
from horovod_tune.coordinator.trial_state import Do, Effect, TrialState
from horovod_tune.coordinator.workers import EventQueue, Worker, call_all, end_workers, replies_to
from horovod_tune.errors import StartFailed, death_text
from horovod_tune.messages import Assignment, FailureKind, TrialRequest
from horovod_tune.spec.trial_spec import PROCESS_START_FACTOR, start_timeout_s


class World:
    """The workers, which run one trial after another, and ``state``, which is that of the current trial."""

    def __init__(self, launcher: Launcher, limits: Limits, events: EventQueue) -> None:
        # The members with their ranks in the trial's first world.
        self._assigned: list[tuple[Worker, Assignment]] = []
        self._launcher = launcher
        self._events = events
        self.slots = Slots(launcher, limits)
        self.state: TrialState[Worker] = TrialState(self.slots.leaving)
        self._request: TrialRequest

    @property
    def limits(self) -> Limits:
        return self.slots.limits

    def forget_trial(self) -> None:
        self.state = TrialState(self.slots.leaving, self.state.members)

    def create(self) -> None:
        """Start the workers, without waiting for them."""
        self.state.members = [Worker(slot, actor=actor) for slot, actor in enumerate(self._launcher.create())]
        self._created = len(self.state.members)

    def form(self) -> None:
        """Wait until the workers have started, and assign the ranks of the trial's first world.

        Raises:
            StartFailed: workers did not start in time, or were placed on other hosts than requested.
        """
        timeout_s = self.limits.timeout_s
        while True:
            members = self.state.members
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
                self.state.members = remaining
                end_workers(lost)

    def _assign_ranks(self, workers: Sequence[Worker], **options: Any) -> list[tuple[Worker, Assignment]]:
        infos = [worker.info for worker in workers if worker.info is not None]
        assignments = self._launcher.assign([worker.actor for worker in workers], infos, **options)
        for worker, assignment in zip(workers, assignments, strict=True):
            worker.ranks = tuple(each.rank for each in assignment.rank_infos)
        self.state.size = sum(len(worker.ranks) for worker in workers)
        return list(zip(workers, assignments, strict=True))

    def _connect(self, workers: Sequence[Worker]) -> None:
        """Open the channels of workers on this host; ``workers`` are in the order of the assignments."""
        for number, channel in self._launcher.channels().items():
            self._events.add_channel(workers[number], channel)
        lost_meanwhile = [each for each in workers if each not in self.state.members]
        self._events.close_channels(lost_meanwhile)

    def begin(self, request: TrialRequest) -> None:
        """Start a trial's training function on every member, whose ranks `form` has assigned."""
        self._request = request
        members = list(self.state.members)
        self._events.close_channels(members)  # those of the trial before
        calls = [worker.actor.begin.remote(each, request) for worker, each in self._assigned]
        self.state.begin(request.checkpoint)
        self._await(members, calls)
        self._connect(members)
        self.poll_all()
        self.slots.start_missing(self.state.members)

    def poll_all(self) -> None:
        for worker in self.state.members:
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

    def lose(self, worker: Worker, kind: FailureKind, text: str) -> None:
        """Handle the loss of a worker: the trial fails, or continues without it."""
        worker.is_polled = False
        self.carry_out(self.state.lose(worker, kind, text, time.monotonic()))

    @property
    def tick_s(self) -> float:
        """How long to listen before `advance` is called again."""
        is_busy = self.state.change is not None or self.slots.starting
        return TICK_S if is_busy else self.limits.heartbeat_s

    def advance(self, listening_since: float) -> None:
        """Treat workers with an overdue heartbeat as lost, then do what the state decides."""
        for worker in list(self.state.members):
            limit_s = self.limits.prompt_s if worker.is_reply_requested else self.limits.timeout_s
            if worker.overdue_s(listening_since) > limit_s:
                source = "an immediate reply was requested" if worker.is_reply_requested else "timeout_s"
                self.lose(worker, FailureKind.UNRESPONSIVE, f"no heartbeat for {limit_s:g} s ({source})")
        self.carry_out(self.state.check_reports(time.monotonic()))
        if not self.state.may_change:
            return
        if not self.state.returned:
            self.slots.replace_draining(self.state.members)
        ready = self.slots.ready(self.state.members)
        self.carry_out(self.state.tick(time.monotonic(), ready))

    def carry_out(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            self._carry_out(effect.do, effect.members)

    def _carry_out(self, do: Do, workers: Sequence[Worker]) -> None:
        members = self.state.members
        match do:
            case Do.BREAK_WORLD:
                self._launcher.abandon_world()
                for worker in members:
                    worker.actor.break_world.remote(self.state.number)
            case Do.RELEASE_REPORTS:
                for worker in members:
                    worker.actor.acknowledge.remote(self._request.run, math.inf, self.state.checkpoint)
            case Do.REQUEST_STACKS:
                for worker in members:
                    worker.actor.reply_now.remote()
            case Do.OFFER_CHANGE:
                for worker in members:
                    worker.actor.offer_change.remote(self.state.number)
            case Do.FORM_WORLD:
                self._form_next(workers)
            case Do.REQUEST_REPLIES:
                for worker in workers:
                    worker.request_reply(every_s=self.limits.prompt_s / 2)
            case Do.END | Do.END_LOST:
                self._events.close_channels(workers)
                for worker in workers:
                    worker.is_polled = False
                end_workers(workers, wait=do is Do.END)
            case Do.REUSE:
                self._events.close_channels(workers)
                self.slots.reuse(*workers)
            case Do.REPLACE:
                self.slots.replace(*workers)
            case Do.RESTART_LATER:
                self.slots.restart_later(*workers)
            case Do.RELEASE_SLOT:
                for worker in workers:
                    self._launcher.release_slot(worker.slot)

    def _form_next(self, joining: Sequence[Worker]) -> None:
        """Form the next world from the members, all of which have left the old one, and from ``joining``."""
        workers = [*self.state.members, *joining]
        assert workers[0].info is not None
        try:
            # The oldest member becomes rank 0: it has the last commit.
            assigned = self._assign_ranks(workers, first_node=workers[0].info.node_id)
        except StartFailed as error:
            self.state.record_unformed(str(error))
            calls = [worker.actor.describe.remote() for worker in workers]
            if self._await(workers, calls, self.limits.prompt_s):  # a host is unsuitable
                if joining:
                    self.slots.restart_later(joining[-1])  # and try without it
                else:
                    self.state.fail_change()
            return
        self.state.record_formed(workers)
        self.slots.record_joined(joining)
        state = self.state
        request = replace(
            self._request, world_number=state.number, reports=state.reports, checkpoint=state.checkpoint
        )
        calls = [
            worker.actor.begin.remote(each, request)
            if worker in joining
            else worker.actor.rejoin.remote(each, state.number, request.reports, request.resources)
            for worker, each in assigned
        ]
        self._await(workers, calls)
        self._connect(workers)
        if state.change is not None:
            # Again: workers that had not begun ignored the first one.
            self.carry_out([Effect(Do.BREAK_WORLD)])
        self.poll_all()

    def resize(self, workers: int, resources: bytes) -> bool:
        """Change the number of ranks at the next commit; False if the trial must restart instead.

        ``resources`` are its new resources, as in `TrialRequest`.
        """
        if not self.state.may_change or self.state.returned:
            return False
        # Ray removes a placement group only as a whole, so no slot in the trial's own group can be released.
        if workers < self._created:
            return False
        if not self.first_reply("can_restore", timeout_s=self.limits.prompt_s):
            return False
        self.slots.leaving.limits = replace(self.limits, max_workers=workers)
        self._request = replace(self._request, resources=resources)
        self.slots.release_excess(self.state.members)
        self.slots.start_missing(self.state.members)
        self.carry_out(self.state.offer_change_if_due(False, time.monotonic()))
        return True

    def first_reply(self, method: str, *, timeout_s: float) -> Any:
        """Call ``method`` on one member after another, ``timeout_s`` each; return the first reply or None."""
        for worker in self.state.members:
            try:
                return ray.get(getattr(worker.actor, method).remote(), timeout=timeout_s)
            except RayError:
                continue  # `advance` handles the loss
        return None

    def close(self) -> None:
        """End every worker's process and wait until it is gone; may be called twice."""
        self.slots.end(self.slots.starting)
        members, self.state.members = self.state.members, []
        for worker in members:
            worker.is_polled = False  # its reply may arrive during the next trial
        self._events.close_channels(members)
        below = self._launcher.processes_below()
        end_workers(members, below=below, lost_nodes=self.state.lost_nodes)
        self._launcher.close()
