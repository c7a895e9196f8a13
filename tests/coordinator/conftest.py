"""A simulated clock, and worker groups of `fake_workers` that are closed after the test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import ray
from fake_workers import REQUEST, Clock, FakeTrial, Prepare, Ref, do_nothing
from ray.exceptions import GetTimeoutError

from horovod_tune.coordinator import slots, world
from horovod_tune.coordinator.workers import EventQueue, Replies, Reports, Worker
from horovod_tune.ray_compat import queries


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A simulated clock instead of the real one, also in the functions of Ray that the group calls."""
    clock = Clock()
    receive = EventQueue.wait

    def wait_for_events(self: EventQueue, timeout_s: float) -> tuple[Replies, Reports]:
        end = clock.now + timeout_s
        while True:
            replies, reports = receive(self, 0)
            if replies or reports or clock.now >= end:
                return replies, reports
            clock.advance(end - clock.now)

    def wait(
        refs: list[Ref], *, num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Ref], list[Ref]]:
        assert timeout is not None, "a wait without a timeout"
        end = clock.now + timeout
        while True:
            ready = [ref for ref in refs if ref.reply.done()]
            if len(ready) >= num_returns or clock.now >= end:
                return ready, [ref for ref in refs if ref not in ready]
            clock.advance(end - clock.now)

    def get(refs: Any, *, timeout: float | None = None) -> Any:
        several = isinstance(refs, list)
        asked = refs if several else [refs]
        ready, waiting = wait(asked, num_returns=len(asked), timeout=0 if timeout is None else timeout)
        for ref in ready:
            ref.reply.result()
        if waiting:
            raise GetTimeoutError
        return [ref.reply.result() for ref in refs] if several else refs.reply.result()

    def end_workers(workers: Sequence[Worker], **options: Any) -> None:
        for worker in workers:
            worker.actor.kill()

    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(EventQueue, "wait", wait_for_events)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(slots, "end_workers", end_workers)
    monkeypatch.setattr(world, "end_workers", end_workers)
    return clock


@pytest.fixture
def make(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeTrial]]:
    """Begin a trial on fake workers, all of which must be killed when it is closed."""
    made: list[FakeTrial] = []
    monkeypatch.setattr(
        queries, "draining_nodes", lambda: {n for each in made for n in each.launcher.draining}
    )

    def begin(size: int = 3, *, prepare: Prepare = do_nothing, **options: Any) -> FakeTrial:
        made.append(FakeTrial(clock, size, **options))
        prepare(made[-1].actors)
        made[-1].group.begin(REQUEST)
        return made[-1]

    yield begin
    for trial in made:
        trial.group.close()
        assert trial.launcher.is_closed
        assert all(actor.called("kill") for actor in trial.launcher.all_actors)
