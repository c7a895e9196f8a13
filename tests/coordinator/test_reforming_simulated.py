"""Worlds of up to 256 simulated ranks that lose some of them and form again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from fake_workers import FakeTrial

SLOTS = 8  # per host


@pytest.fixture
def make(make: Callable[..., FakeTrial]) -> Callable[..., FakeTrial]:
    def begin(
        size: int, *, min_workers: int = 1, max_workers: int | None = None, cluster_is_full: bool = False
    ) -> FakeTrial:
        trial = make(
            size,
            min_workers=min_workers,
            max_workers=max_workers or size,
            cluster_is_full=cluster_is_full,
            slots_per_host=SLOTS,
        )
        trial.next_report()
        return trial

    return begin


def check_world(trial: FakeTrial) -> None:
    """Check that the live actors form one world, with ranks that are consecutive on each host."""
    assert trial.is_settled
    alive = sorted(trial.launcher.alive, key=lambda actor: actor.rank)
    assert [actor.rank for actor in alive] == list(range(len(alive)))
    hosts = [actor.replies["describe"].host for actor in alive]
    assert len([1 for a, b in itertools.pairwise(hosts) if a != b]) == len(set(hosts)) - 1
    assert list(trial.group.state.hosts.values()) == hosts


def must_restart(trial: FakeTrial, node: str) -> bool:
    return trial.group.world.slots.must_restart_elsewhere(trial.group.state.members, node)


@pytest.mark.long
@pytest.mark.parametrize("cluster_is_full", [False, True])
@pytest.mark.parametrize("size", [2, 16, 256])
def test_a_loss_costs_calls_in_proportion_to_the_ranks(
    make: Callable[..., FakeTrial], size: int, cluster_is_full: bool
) -> None:
    trial = make(size, cluster_is_full=cluster_is_full)
    before = trial.calls
    trial.world[-1].die()
    report = trial.next_report()
    assert report.index == 2, "no report is lost or repeated"
    assert report.metrics == {"size": size - 1 if cluster_is_full else size}
    if not cluster_is_full:
        check_world(trial)
    # These include two heartbeats of each rank.
    assert trial.calls - before <= 11 * size + 8


@pytest.mark.long
@pytest.mark.parametrize("seed", range(8))
def test_after_random_losses_the_live_ranks_form_one_world(make: Callable[..., FakeTrial], seed: int) -> None:
    """Losses of single ranks, of rank 0 and of whole hosts, also while ranks leave or rejoin."""
    choose = random.Random(seed)
    size = choose.choice([5, 40, 128])
    trial = make(size)
    for _ in range(5):
        trial.launcher.dies_after = {
            event: choose.randint(1, size)
            for event in choose.sample(["leave", "rejoin"], choose.randint(0, 2))
        }
        alive = sorted(trial.launcher.alive, key=lambda actor: actor.slot)
        host = choose.choice(alive).slot // SLOTS
        lost = choose.choice(
            [
                [actor for actor in alive if actor.slot // SLOTS == host],
                [choose.choice(alive)],
                [trial.world[0]],
            ]
        )
        if len(lost) + 3 > len(alive):
            lost = lost[:1]
        for actor in lost:
            actor.die()
        trial.next_report()
        trial.settle()
        trial.launcher.dies_after = {}
    check_world(trial)
    assert len(trial.launcher.alive) == size


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_after_random_resizes_a_trial_has_the_last_size(make: Callable[..., FakeTrial], seed: int) -> None:
    """Resizes while ranks are lost, leave and rejoin, and before the previous size is reached."""
    choose = random.Random(seed)
    size = choose.choice([1, 4, 24])
    trial = make(size)
    wanted = size
    for _ in range(12):
        trial.launcher.dies_after = {
            event: choose.randint(1, size)
            for event in choose.sample(["leave", "rejoin"], choose.randint(0, 2))
            if len(trial.group.state.members) > 4
        }
        if len(trial.group.state.members) > 2 and choose.random() < 0.5:
            choose.choice(sorted(trial.launcher.alive, key=lambda actor: (actor.slot, actor.rank))).die()
        asked = choose.randint(5, 40)  # so that some ranks are left
        if trial.group.world.resize(asked, b"%d" % asked):
            wanted = asked
        assert (wanted == asked) or asked < size, "slots of the placement group cannot be released"
        trial.next_report()
    trial.launcher.dies_after = {}
    for _ in range(50):
        if trial.is_settled and len(trial.launcher.alive) == wanted:
            break
        trial.next_report()
    assert sorted(worker.slot for worker in trial.group.state.members) == list(range(wanted))
    check_world(trial)
    assert {actor.resources for actor in trial.launcher.alive} <= {b"%d" % wanted, b""}


def test_ranks_that_leave_a_draining_host_and_by_a_resize_leave_once(make: Callable[..., FakeTrial]) -> None:
    trial = make(SLOTS)
    assert trial.group.world.resize(2 * SLOTS, b"")
    trial.next_report()
    trial.settle()
    trial.launcher.draining = {"node 1"}
    for actor in trial.world:
        actor.replies["offer_change"] = None  # it does not reach a commit
    trial.next_report()
    assert len(trial.launcher.alive) == 3 * SLOTS, "replacements start"
    assert trial.group.world.resize(SLOTS, b"")
    started = trial.launcher.all_actors[2 * SLOTS :]
    assert all(actor.called("kill") for actor in started), "the replacements are no longer wanted"
    assert len(trial.group.state.members) == 2 * SLOTS, "the others continue until a commit"
    for actor in trial.world:
        actor.replies["offer_change"] = actor.leave_world
    while len(trial.group.state.members) > SLOTS:
        trial.next_report()
    assert [worker.slot for worker in trial.group.state.members] == list(range(SLOTS))
    assert set(trial.launcher.released) == set(range(SLOTS, 2 * SLOTS))


@pytest.mark.parametrize("cluster_is_full", [False, True])
def test_ranks_leave_a_draining_host_at_a_commit_and_others_start_elsewhere(
    make: Callable[..., FakeTrial], cluster_is_full: bool
) -> None:
    trial = make(24, min_workers=16, cluster_is_full=cluster_is_full)
    trial.launcher.draining = {"node 1"}
    size = 16 if cluster_is_full else 24
    while len(trial.group.state.members) != size or "host1" in trial.group.state.hosts.values():
        trial.next_report()
    change = trial.group.state.changes[0]
    assert "rank 8 on host1" in change and "is draining" in change and "ranks 8" not in change
    assert not must_restart(trial, "node 0") and must_restart(trial, "node 1")
    assert trial.group.state.lost_nodes == []


@pytest.mark.parametrize("nodes", [{"node 0", "node 1", "node 2"}, {"node 1"}])
def test_a_trial_with_too_few_other_hosts_stays_on_a_draining_host(
    make: Callable[..., FakeTrial], nodes: set[str]
) -> None:
    trial = make(24, min_workers=20, cluster_is_full=True)
    trial.launcher.draining = nodes
    trial.next_report()
    assert must_restart(trial, "another") and len(trial.group.state.members) == 24
    assert trial.group.state.changes == [], "the next world would have the same ranks"
