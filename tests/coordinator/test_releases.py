"""What ranks that wait in report() are told: once, by the shortest way, and again where it may be lost."""

from __future__ import annotations

from typing import Any

import pytest

from horovod_tune.coordinator.releases import Releases
from horovod_tune.messages import CheckpointPlace


class FakeWorker:
    """A worker that hears releases through its channel, or else through calls of its actor."""

    def __init__(self, *, channel: bool = False, asked: bool = False) -> None:
        self.channel = channel or None
        self.is_asked, self.running = asked, {0}
        self.heard: list[tuple[Any, ...]] = []
        self.actor = self
        self.proceed = self

    def release(self, run: int, index: int, checkpoint: Any) -> bool:
        if self.channel:
            self.heard.append(("channel", index, checkpoint))
        return bool(self.channel)

    def remote(self, index: float, checkpoint: Any) -> None:
        self.heard.append(("call", index, checkpoint))


def send(releases: Releases, *workers: FakeWorker) -> None:
    def ask(worker: FakeWorker, *release: Any) -> None:
        worker.heard.append(("question", *release))

    releases.send(workers, 1, ask)  # type: ignore[arg-type]


PLACE = CheckpointPlace("/storage/checkpoint_000001", None)


@pytest.mark.parametrize(
    ("worker", "heard"),
    [
        (FakeWorker(asked=True), [("call", 3, None)]),
        (FakeWorker(), [("question", 3, None)]),
        (FakeWorker(channel=True, asked=True), [("channel", 3, None)]),
        (FakeWorker(channel=True), [("channel", 3, None), ("question",)]),
    ],
)
def test_each_worker_hears_it_once_by_the_shortest_way(worker: FakeWorker, heard: list[Any]) -> None:
    releases = Releases()
    releases.note(3, None)
    send(releases, worker)
    send(releases, worker)  # nothing was noted since
    assert worker.heard == heard


def test_the_newest_checkpoint_goes_with_every_release() -> None:
    releases, worker = Releases(), FakeWorker(asked=True)
    releases.note(1, PLACE)
    send(releases, worker)
    releases.note(2, None)
    send(releases, worker)
    releases.send_last([worker])  # type: ignore[list-item]
    assert [index for _, index, _ in worker.heard] == [1, 2, float("inf")]
    assert {place.path for _, _, place in worker.heard} == {PLACE.path}
    assert {place.report for _, _, place in worker.heard} == {1}
    assert releases.newest is not None and releases.newest.report == 1


def test_what_a_channel_may_have_lost_comes_with_the_next_question() -> None:
    releases = Releases()
    assert releases.lost_to(FakeWorker(channel=True)) == ()  # type: ignore[arg-type]
    releases.note(4, None)
    send(releases)
    for worker, lost in [
        (FakeWorker(channel=True), (4, None)),
        (FakeWorker(), ()),
    ]:
        assert releases.lost_to(worker) == lost  # type: ignore[arg-type]
