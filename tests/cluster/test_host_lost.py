"""A host that is lost in mid-training: the trial fails with its name in time, and goes on elsewhere."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import REPOSITORY, Lab, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), pytest.mark.usefixtures("hosts_possible")]
JOB = REPOSITORY / "tests/cluster/jobs/steady_training.py"
TIMEOUT_S = 15.0
IN_TIME_S = TIMEOUT_S + 20.0
"""timeout_s, a quarter of it between two looks, then the look for the cause and the end of the others."""
RESTART_S = 60.0
"""What a new start on other hosts may take on a busy machine."""


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
        return self.lab.run("n1", "cat ~/ray_results/steady/*/error.txt", timeout_s=20, check=False).stdout

    def wait_for_failure(self, number: int, who: str, host: str, *, timeout_s: float) -> float:
        """Wait until Tune's error file names who was lost in that failure; return the seconds."""
        # The coordinator takes no CPU and may be on any host; lost with it, Ray names the host instead.
        coordinator = f" ip: {self.lab.ip(host)}"

        def named() -> bool:
            _, found, error = self.errors().partition(f"Failure # {number} ")
            return bool(found) and (who in error or coordinator in error)

        try:
            return wait_until(named, timeout_s=timeout_s, what=f"failure {number}, {who}")
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.errors()[-3000:]}") from late

    def wait_for_progress(self, *, failures: int) -> float:
        """Wait until the trial has got past where it is, after so many failures; return the seconds."""
        step = self.step
        return wait_until(
            lambda: self.failures == failures and self.step > step,
            timeout_s=RESTART_S,
            what=f"the trial to go on after {failures} failures",
        )


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    log = tmp_path_factory.mktemp("lost") / "driver.log"
    with Lab(6) as lab:
        lab.start_ray(head_cpus=0)
        driver = lab.start("n1", ["bash", "-lc", f"exec python {JOB} {TIMEOUT_S}"], log)
        try:
            training = Training(lab, log)
            training.wait_for_step(3, timeout_s=200)
            yield training
            lab.run("n1", "touch /shared/stop", timeout_s=10)
            assert driver.wait(timeout=60) == 0, log.read_text()[-4000:]
            # Everything the trial held is free again on the hosts that are left.
            assert re.search(r"^ENDED errors 0$", log.read_text(), re.M)
            assert re.search(r"^CPUS ([\d.]+) free of \1$", log.read_text(), re.M), log.read_text()[-500:]
        finally:
            driver.kill()
            driver.wait(timeout=20)


def test_a_killed_process_is_named_and_the_trial_goes_on(training: Training) -> None:
    host = training.hosts[1]
    training.lab.run(host, ["kill", "-KILL", str(training.processes[1])], timeout_s=10)
    took = training.wait_for_failure(1, f"rank 1 of 2 on {host} died", host, timeout_s=IN_TIME_S)
    on_again = training.wait_for_progress(failures=1)
    print(f"process killed: failed after {took:.1f} s, on again {on_again:.1f} s later")


def test_a_cut_of_12_seconds_is_ridden_out(training: Training) -> None:
    failures = training.failures
    training.lab.cut(training.hosts[1])
    time.sleep(12)  # the length of the cut is what is tested
    training.lab.heal(training.hosts[1])
    on_again = training.wait_for_progress(failures=failures)
    print(f"cut of 12 s: on again {on_again:.1f} s later")


@pytest.mark.parametrize("how", ["drop", "down"])
def test_a_host_that_goes_silent_is_named_in_time_and_left_out(training: Training, how: str) -> None:
    failures, host = training.failures, training.hosts[1]
    training.lab.cut(host, how)
    took = training.wait_for_failure(failures + 1, f"rank 1 of 2 on {host}", host, timeout_s=IN_TIME_S)
    on_again = training.wait_for_progress(failures=failures + 1)
    print(f"{how}: failed after {took:.1f} s, on again {on_again:.1f} s later")
    assert host not in training.hosts


def test_a_host_that_its_cloud_switches_off_is_named_and_not_counted(training: Training) -> None:
    failures, host = training.failures, training.hosts[1]
    notice = (
        "from horovod_tune.ray_adapter import drain_as_preempted;"
        f"drain_as_preempted('{training.lab.ip('n1')}:6379', '{training.lab.ip(host)}', in_s=60.0)"
    )
    training.lab.run(host, f'python -c "{notice}"', timeout_s=60)
    training.lab.power_off(host)
    training.wait_for_failure(failures, f"pre-empted: rank 1 of 2 on {host}", host, timeout_s=IN_TIME_S)
    training.wait_for_progress(failures=failures)  # as many as before
    assert host not in training.hosts
