"""An elastic trial on three hosts: whatever happens to one, the others continue, and it grows again."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from faults import drop
from host_faults import hosts
from lab import wait_until
from steady import RESTART_S, Training, steady_training

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200), pytest.mark.usefixtures("hosts_possible")]
RANKS = 3
# Gloo is waited for half as long: what a host that does not respond costs.
TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    log = tmp_path_factory.mktemp("elastic") / "driver.log"
    with hosts() as lab, steady_training(lab, log, timeout_s=TIMEOUT_S, min_workers=2) as training:
        yield training
        steps = [each.step for each in training.seen()]
        assert all(after - before in (0, 1) for before, after in pairwise(steps)), "a report was lost"
        assert {each.failures for each in training.seen()} == {0}, "no start from the beginning"


def wait_for_ranks(training: Training, ranks: int) -> None:
    """Wait until the trial has reported twice with so many."""
    for _ in range(2):
        seen = len(training.seen())
        wait_until(
            lambda seen=seen: len(training.seen()) > seen and len(training.hosts) == ranks,
            timeout_s=RESTART_S,
            what=f"a report of {ranks} ranks",
        )


def lose(training: Training, rank: int, fault: object) -> str:
    """Do the fault to the host of a rank, wait for a report of those left, and return how long it took."""
    wait_for_ranks(training, RANKS)
    host, process = training.hosts[rank], training.processes[rank]
    reports = len(training.seen())
    fault(training, host)  # type: ignore[operator]
    wait_until(
        lambda: any(f"{host}:{process}" not in each.places for each in training.seen()[reports:]),
        timeout_s=RESTART_S,
        what="the others to continue",
    )
    told = training.seen()[reports - 1 :]
    silent_s = max(after.time_s - before.time_s for before, after in pairwise(told))
    return f"{silent_s:.1f} s without a report, {told[-1].change_s:.2f} s of them after the loss was known"


def test_the_others_continue_without_a_host_out_of_reach_and_it_comes_back(training: Training) -> None:
    lab = training.lab
    wait_for_ranks(training, RANKS)
    host = training.hosts[1]
    print(f"out of reach: {lose(training, 1, drop)}")
    lab.heal(host)
    lab.run(host, "ray stop --force", timeout_s=120)
    lab.start_ray_on(host)
    wait_for_ranks(training, RANKS)


def test_the_others_continue_without_a_host_that_has_lost_its_power(training: Training) -> None:
    power_off = lambda training, host: training.lab.power_off(host)  # noqa: E731
    print(f"power off: {lose(training, 1, power_off)}")
    wait_for_ranks(training, RANKS - 1)
