"""A host that is lost in mid-training: the trial fails with its name in time, and goes on elsewhere."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import REPOSITORY, Lab, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200), pytest.mark.usefixtures("hosts_possible")]
JOB = REPOSITORY / "tests/cluster/jobs/steady_training.py"
# More than twice the cut that is to be ridden out: TCP asks again after 12, 13 or up to 24 s then.
TIMEOUT_S = 30.0
# timeout_s, a quarter of it between two looks, then the look for the cause and the end of the others.
IN_TIME_S = TIMEOUT_S + 15.0
# What new starts on other hosts may take on a busy machine.
RESTART_S = 240.0


class Training:
    """The trial under way, as the driver's output tells."""

    def __init__(self, lab: Lab, log: Path) -> None:
        self.lab, self._log = lab, log

    def seen(self) -> list[tuple[int, list[str], int]]:
        found = re.findall(r"^SAW step (\d+) hosts (.*) failures (\d+)$", self._log.read_text(), re.M)
        return [(int(step), hosts.split(), int(failures)) for step, hosts, failures in found]

    @property
    def step(self) -> int:
        return self.seen()[-1][0]

    @property
    def hosts(self) -> list[str]:
        return [place.split(":")[0] for place in self.seen()[-1][1]]

    @property
    def processes(self) -> list[int]:
        return [int(place.split(":")[1]) for place in self.seen()[-1][1]]

    @property
    def failures(self) -> int:
        return self.seen()[-1][2]

    def wait_for_step(self, step: int, *, timeout_s: float) -> float:
        try:
            return wait_until(
                lambda: self.seen() and self.step >= step, timeout_s=timeout_s, what=f"step {step}"
            )
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self._log.read_text()[-6000:]}") from late

    def errors(self) -> str:
        return self.lab.run("n1", "cat ~/ray_results/steady/*/error.txt", timeout_s=60, check=False).stdout

    def wait_for_failure(self, who: str, *, after: int, timeout_s: float) -> float:
        """Wait until a failure that Tune's error file did not hold `after` so many names who was lost.

        One before it may be a start that took longer than `timeout_s` on a busy machine. Returns the seconds.
        """

        def named() -> bool:
            return any(who in error for error in self.failures_told()[after:])

        try:
            return wait_until(named, timeout_s=timeout_s, what=f"a failure that names {who}")
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.errors()[-3000:]}") from late

    def failures_told(self) -> list[str]:
        """Every failure in Tune's error file, those that were not counted too, in order."""
        return self.errors().split("Failure # ")[1:]

    def counted_failures(self, before: int) -> int:
        """How many failures Tune has counted since there were `before`, starts that were too slow aside."""
        slow = sum("StartFailed" in error for error in self.failures_told())
        return self.failures - slow - before

    def wait_for_progress(self, *, without: str | None = None) -> float:
        """Wait until the trial has got past where it is, on hosts without one; return the seconds."""
        step, lines = self.step, len(self.seen())
        return wait_until(
            lambda: len(self.seen()) > lines and self.step > step and without not in self.hosts,
            timeout_s=RESTART_S,
            what=f"the trial to go on without {without}",
        )


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    log = tmp_path_factory.mktemp("lost") / "driver.log"
    with Lab(6) as lab:
        lab.start_ray(head_cpus=0)
        driver = lab.start("n1", ["bash", "-lc", f"exec python {JOB} {TIMEOUT_S}"], log)
        try:
            training = Training(lab, log)
            training.wait_for_step(3, timeout_s=400)
            yield training
            lab.run("n1", "touch /shared/stop", timeout_s=30)
            assert driver.wait(timeout=180) == 0, log.read_text()[-4000:]
            # Everything the trial held is free again on the hosts that are left.
            assert re.search(r"^ENDED errors 0$", log.read_text(), re.M)
            assert re.search(r"^CPUS ([\d.]+) free of \1$", log.read_text(), re.M), log.read_text()[-500:]
        finally:
            driver.kill()
            driver.wait(timeout=20)


def test_a_killed_process_is_named_and_the_trial_goes_on(training: Training) -> None:
    told, host = len(training.failures_told()), training.hosts[1]
    training.lab.run(host, ["kill", "-KILL", str(training.processes[1])], timeout_s=30)
    took = training.wait_for_failure(f"rank 1 of 2 on {host} died", after=told, timeout_s=IN_TIME_S)
    on_again = training.wait_for_progress()
    print(f"process killed: failed after {took:.1f} s, on again {on_again:.1f} s later")


def test_a_cut_of_12_seconds_is_ridden_out(training: Training) -> None:
    told = training.failures_told()
    training.lab.cut(training.hosts[1])
    time.sleep(12)  # the length of the cut is what is tested
    training.lab.heal(training.hosts[1])
    on_again = training.wait_for_progress()
    print(f"cut of 12 s: on again {on_again:.1f} s later")
    assert training.failures_told() == told


@pytest.mark.parametrize(("how", "rank"), [("drop", 1), ("down", 0)])
def test_a_host_that_goes_silent_is_named_in_time_and_left_out(
    training: Training, how: str, rank: int
) -> None:
    told, host = len(training.failures_told()), training.hosts[rank]
    # The coordinator is with rank 0: where that host is lost, nobody is left to name the rank.
    who = f"rank 1 of 2 on {host}" if rank else f"the coordinator on {host}, beside rank 0, was lost"
    training.lab.cut(host, how)
    took = training.wait_for_failure(who, after=told, timeout_s=IN_TIME_S)
    on_again = training.wait_for_progress(without=host)
    print(f"{how}: failed after {took:.1f} s, on again {on_again:.1f} s later")


def test_a_host_that_its_cloud_switches_off_is_named_and_not_counted(training: Training) -> None:
    told, counted, host = len(training.failures_told()), training.counted_failures(0), training.hosts[1]
    notice = (
        "from horovod_tune.ray_adapter import drain_as_preempted;"
        f"drain_as_preempted('{training.lab.ip('n1')}:6379', '{training.lab.ip(host)}', in_s=60.0)"
    )
    training.lab.run(host, f'python -c "{notice}"', timeout_s=120)
    training.lab.power_off(host)
    who = f"pre-empted: rank 1 of 2 on {host}"
    training.wait_for_failure(who, after=told, timeout_s=IN_TIME_S)
    training.wait_for_progress(without=host)
    assert training.counted_failures(counted) == 0  # as many as before
