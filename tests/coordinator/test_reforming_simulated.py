"""Worlds of up to 256 ranks that lose some and form again: the coordinator's own code on simulated workers.

No torch, no Ray, no processes: an actor is an object that answers as a rank does, at once. What is left is
what the coordinator itself does.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
from ray.exceptions import RayActorError

from horovod_tune.coordinator import (
    actor_processes,
    draining,
    elastic_group,
    joining,
    reforming_group,
    signs_of_life,
    worker,
    worker_group,
)
from horovod_tune.coordinator.draining import DrainingHosts
from horovod_tune.coordinator.elastic_group import ElasticGroup
from horovod_tune.errors import TrainingFailed
from horovod_tune.gloo.ranks import assign_worlds
from horovod_tune.messages import Assignment, Finished, NeedsWorld, Report, TrialRequest, WorkerInfo, World

pytestmark = pytest.mark.processes

SLOTS = 8  # ranks of a simulated host


class Ref:
    """What a call of an actor returns."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def future(self) -> Future[Any]:
        return self._future


class Call:
    def __init__(self, actor: FakeActor, name: str) -> None:
        self._actor, self._name = actor, name

    def remote(self, *arguments: Any) -> Ref:
        actor = self._actor
        actor.cluster.calls += 1
        future: Future[Any] = Future()
        if not actor.is_alive:
            future.set_exception(RayActorError())
        elif not actor.starts:
            pass  # no answer
        elif self._name == "poll":
            actor.answer_poll(future)
        else:
            future.set_result(getattr(actor, f"do_{self._name}")(*arguments))
        return Ref(future)


class FakeActor:
    """One rank: it leaves its world when it is told to, and reports when it is rank 0 of a new one."""

    def __init__(self, cluster: FakeCluster, place: int) -> None:
        self.cluster, self.place = cluster, place
        self.is_alive = self.starts = True
        self.elsewhere = False
        self.world: World | None = None
        self.number = -1
        self.waits = False
        self.reports = 0
        self.messages: list[Any] = []
        self._poll: Future[Any] | None = None

    def __getattr__(self, name: str) -> Call:
        if name.startswith(("_", "do_")):
            raise AttributeError(name)
        return Call(self, name)

    def answer_poll(self, future: Future[Any]) -> None:
        self._poll = future
        self._flush()

    def send(self, message: Any) -> None:
        self.messages.append(message)
        self._flush()

    def _flush(self) -> None:
        if self._poll is not None and self.messages:
            (future, self._poll), messages = (self._poll, None), self.messages
            self.messages = []
            future.set_result(messages)

    def die(self) -> None:
        self.is_alive = False
        self.cluster.alive.discard(self)
        if self._poll is not None:
            future, self._poll = self._poll, None
            future.set_exception(RayActorError())

    def do_describe(self) -> WorkerInfo:
        host = "spare" if self.elsewhere else f"host{self.place // SLOTS}"
        return WorkerInfo(host, "10.0.0.1", host, 1000 + self.cluster.actors.index(self), 0.0)

    def do_load(self) -> None:
        return None

    def do_assign(self, assignment: Assignment) -> None:
        (self.world,) = assignment.worlds

    def do_begin(self, order: TrialRequest) -> None:
        self.number, self.reports, self.waits = order.world_number, order.reports, False
        self.resources = order.resources
        self.train()

    def do_break_world(self, number: int) -> None:
        if number == self.number and not self.waits:
            self.waits = True
            assert self.world is not None
            self.send(NeedsWorld(self.world.rank))
            self.cluster.note("leave")

    def do_rejoin(self, assignment: Assignment, number: int, reports: int, resources: bytes) -> None:
        assert self.waits, "a rank that has not left its world was given another"
        (self.world,), self.number, self.reports, self.waits = assignment.worlds, number, reports, False
        self.resources = resources
        self.cluster.note("rejoin")
        self.train()

    def do_offer_change(self, number: int) -> None:
        self.do_break_world(number)  # its next commit comes at once

    def do_has_committed(self) -> bool:
        return True

    def do_ping(self) -> int:
        return self.reports

    def do_proceed(self, index: float, checkpoint: Any = None) -> None:
        return None

    def do_stop_training(self) -> None:
        return None

    do_close_world = do_send_logs = do_stop_training

    def train(self) -> None:
        assert self.world is not None
        self.reports += 1
        if self.world.rank == 0 and self.is_alive:
            self.send(Report(self.reports, {"world": self.number}))


class FakeCluster:
    """Stands for Ray and for the launcher; ``doomed`` says at which events of re-forming an actor dies."""

    def __init__(self, size: int, *, come_back: bool) -> None:
        self.size, self.come_back = size, come_back
        self.actors: list[FakeActor] = []
        self.alive: set[FakeActor] = set()
        self.calls = 0
        self.doomed: dict[str, int] = {}
        self.draining: set[str] = set()
        self.given_back: set[int] = set()

    def note(self, event: str) -> None:
        """A rank goes through ``event``; now and then another one dies of it."""
        left = self.doomed.get(event)
        if left is not None:
            self.doomed[event] = left - 1
            if left == 1:
                del self.doomed[event]
                max(self.alive, key=lambda actor: actor.place).die()

    # What the coordinator's modules use of Ray.
    def wait(self, refs: Sequence[Ref], *, num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        done = [ref for ref in refs if ref.future().done()]
        return done, [ref for ref in refs if not ref.future().done()]

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        return [ref.future().result(0) for ref in refs] if isinstance(refs, list) else refs.future().result(0)

    # What a launcher does.
    def create(self) -> list[FakeActor]:
        return [self._actor(place) for place in range(self.size)]

    def create_one(self, place: int, *, elsewhere: bool = False, again: bool = False) -> FakeActor:
        actor = self._actor(place)
        actor.elsewhere = elsewhere
        actor.starts = self.come_back
        if not actor.starts:
            self.alive.discard(actor)
        return actor

    def abandon_world(self) -> None:
        pass

    @property
    def placed_workers(self) -> int:
        return self.size

    def give_back(self, place: int) -> None:
        assert all(actor.place != place for actor in self.alive), "its room is still used"
        self.given_back.add(place)

    def _actor(self, place: int) -> FakeActor:
        actor = FakeActor(self, place)
        self.actors.append(actor)
        self.alive.add(actor)
        return actor

    def assign(
        self, actors: Sequence[FakeActor], facts: Sequence[WorkerInfo], *, first_node: str | None = None
    ) -> list[Assignment]:
        worlds = assign_worlds([each.node_id for each in facts], first_node=first_node or "host0")
        return [Assignment((world,), {}) for world in worlds]

    def channels(self) -> dict[int, Any]:
        return {}

    def processes_below(self) -> list[WorkerInfo]:
        return []

    def close(self) -> None:
        return None


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a simulated trial; returns its group, its cluster, and the first report."""

    def start(size: int, *, come_back: bool = True, **options: Any) -> tuple[ElasticGroup, FakeCluster, Any]:
        cluster = FakeCluster(size, come_back=come_back)
        for module in (elastic_group, joining, reforming_group, signs_of_life, worker, worker_group):
            monkeypatch.setattr(module, "ray", cluster)
        monkeypatch.setattr(
            actor_processes, "end_actors", lambda actors, facts, **_: [a.die() for a in actors]
        )
        monkeypatch.setattr(draining, "LOOK_EVERY_S", 0.0)
        monkeypatch.setattr(
            elastic_group, "DrainingHosts", lambda: DrainingHosts(lambda: set(cluster.draining))
        )
        limits = {"timeout_s": 60.0, "min_workers": 1, "max_workers": size, "wait_s": 60.0, **options}
        group = ElasticGroup(cluster, **limits)  # type: ignore[arg-type]
        group.begin(TrialRequest("t", "t", "", "", "", {}, b""))
        return group, cluster, group.next_event()

    yield start


def go_on(group: ElasticGroup, report: Any) -> Report | Finished:
    group.proceed(report.index, None)
    return group.next_event()


def is_settled(group: ElasticGroup, cluster: FakeCluster) -> bool:
    """Whether every rank that lives is in one world, in which none is that does not."""
    newest = max(each.number for each in cluster.alive)
    return len(group.workers) == len(cluster.alive) and all(
        each.number == newest and each.world is not None and each.world.size == len(cluster.alive)
        for each in cluster.alive
    )


def check_world(cluster: FakeCluster) -> None:
    """The ranks that live have one world among them, each another place, consecutive on each host."""
    worlds = sorted((actor.world for actor in cluster.alive if actor.world), key=lambda world: world.rank)
    size = len(cluster.alive)
    assert [world.rank for world in worlds] == list(range(size))
    assert {world.size for world in worlds} == {size}
    hosts = [next(a for a in cluster.alive if a.world is world).do_describe().host for world in worlds]
    assert len([1 for a, b in itertools.pairwise(hosts) if a != b]) == len(set(hosts)) - 1


@pytest.mark.parametrize("come_back", [True, False])
@pytest.mark.parametrize("size", [2, 16, 256])
def test_a_loss_costs_calls_in_proportion_to_the_ranks(begin: Any, size: int, come_back: bool) -> None:
    group, cluster, report = begin(size, come_back=come_back)
    before = cluster.calls
    next(iter(cluster.alive - {cluster.actors[0]})).die()
    began = time.process_time()
    report = go_on(group, report)
    print(
        f"{size} ranks: {cluster.calls - before} calls, {1000 * (time.process_time() - began):.0f} ms of CPU"
    )
    assert report.index == 2, "no report is lost, none is told twice"
    assert len(cluster.alive) == (size if come_back else size - 1)
    check_world(cluster)
    assert cluster.calls - before <= 8 * size + 8


@pytest.mark.parametrize("seed", range(8))
def test_whoever_is_lost_whenever_the_others_form_one_world(begin: Any, seed: int) -> None:
    """Losses while ranks leave and while they take their new places, a whole host at a time, and rank 0."""
    choose = random.Random(seed)
    size = choose.choice([5, 40, 256])
    come_back = seed % 2 == 0
    group, cluster, report = begin(size, come_back=come_back)
    for _ in range(6):
        cluster.doomed = {
            event: choose.randint(1, size)
            for event in choose.sample(["leave", "rejoin"], choose.randint(0, 2))
        }
        host = choose.choice(sorted({actor.place // SLOTS for actor in cluster.alive}))
        lost = choose.choice(
            [
                [actor for actor in cluster.alive if actor.place // SLOTS == host],
                [choose.choice(sorted(cluster.alive, key=lambda actor: actor.place))],
                [actor for actor in cluster.alive if actor.world and actor.world.rank == 0],
            ]
        )
        if len(lost) + 3 > len(cluster.alive):
            break
        for actor in lost:
            actor.die()
        index = report.index
        report = go_on(group, report)
        while not is_settled(group, cluster) and report.index < index + 50:
            report = go_on(group, report)
        assert report.index > index
        cluster.doomed = {}
    assert is_settled(group, cluster)
    check_world(cluster)
    assert not come_back or len(cluster.alive) == size


@pytest.mark.parametrize("seed", range(30))
def test_a_trial_has_the_size_that_a_scheduler_gave_it_last(begin: Any, seed: int) -> None:
    """Other sizes come while ranks are lost, leave and join, and while the size before is not reached."""
    choose = random.Random(seed)
    size = choose.choice([1, 4, 24])
    group, cluster, report = begin(size)
    wanted = size
    for _ in range(12):
        cluster.doomed = {
            event: choose.randint(1, size)
            for event in choose.sample(["leave", "rejoin"], choose.randint(0, 2))
            if len(group.workers) > 4
        }
        if len(group.workers) > 2 and choose.random() < 0.5:
            choose.choice(sorted(cluster.alive, key=lambda actor: actor.place)).die()
        asked = choose.randint(5, 40)  # so that somebody is left
        if group.resize(asked, b"%d" % asked):
            wanted = asked
        assert (wanted == asked) or asked < size, "only what is in the placement group cannot be given back"
        if not is_settled(group, cluster):  # otherwise nobody has anything to report
            report = go_on(group, report)
    cluster.doomed = {}
    for _ in range(50):
        if is_settled(group, cluster) and len(cluster.alive) == wanted:
            break
        report = go_on(group, report)
    assert sorted(worker.place for worker in group.workers) == list(range(wanted))
    check_world(cluster)
    assert {actor.resources for actor in cluster.alive} <= {b"%d" % wanted, b""}


def test_ranks_whose_host_goes_and_whose_slots_are_taken_leave_once(begin: Any) -> None:
    group, cluster, report = begin(SLOTS)
    assert group.resize(2 * SLOTS, b"")
    while not is_settled(group, cluster):
        report = go_on(group, report)
    cluster.draining = {"host1"}
    group._prepare_to_leave_hosts()
    assert len(cluster.alive) == 3 * SLOTS, "others start in their place"
    assert group.resize(SLOTS, b"")
    assert len(cluster.alive) == 2 * SLOTS, "and end again, while those that train go on"
    while len(group.workers) > SLOTS:
        report = go_on(group, report)
    assert [worker.place for worker in group.workers] == list(range(SLOTS))
    assert cluster.given_back == set(range(SLOTS, 2 * SLOTS))


def test_too_few_ranks_wait_and_then_fail_with_those_who_died(begin: Any) -> None:
    group, cluster, report = begin(256, come_back=False, min_workers=256, wait_s=0.3)
    cluster.actors[200].die()
    with pytest.raises(TrainingFailed, match=r"rank 200 of 256 on host25(.|\n)*255 rank\(s\) are left"):
        go_on(group, report)


@pytest.mark.parametrize("come_back", [True, False])
def test_ranks_leave_a_host_that_is_about_to_go_at_a_commit_and_others_come_elsewhere(
    begin: Any, come_back: bool
) -> None:
    group, cluster, report = begin(24, come_back=come_back, min_workers=16)
    cluster.draining = {"host1"}
    report = go_on(group, report)
    while not is_settled(group, cluster):
        report = go_on(group, report)
    hosts = [worker.facts.host for worker in group.workers]
    assert "host1" not in hosts and len(hosts) == (24 if come_back else 16)
    assert "ranks 8" not in group.world_changes[0] and "rank 8 on host1" in group.world_changes[0]
    assert "about to go" in group.world_changes[0]
    assert not group.may_end_soon("host0") and group.may_end_soon("host1")
    assert group._lost_nodes == [], "nobody was lost"


def test_a_trial_that_cannot_do_without_a_host_stays_until_the_host_goes(begin: Any) -> None:
    for gone in ({"host0", "host1", "host2"}, {"host1"}):
        group, cluster, report = begin(24, come_back=False, min_workers=20)
        cluster.draining = gone
        group.proceed(report.index, None)
        group._listen(0)
        group._tend(0.0)
        assert group.may_end_soon("another") and len(group.workers) == 24
        assert group.world_changes == [], "a world of the same ranks would be no better"
