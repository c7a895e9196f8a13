"""A trial of two or three ranks that trains on a lab's hosts until it is stopped, as its driver sees it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab import REPOSITORY, Lab, wait_until

JOB = REPOSITORY / "tests/cluster/jobs/steady_training.py"
# What a new start on other hosts may take on a busy machine.
RESTART_S = 240.0


@dataclass(frozen=True)
class Seen:
    """One report, as Tune saw it."""

    time_s: float
    step: int
    # HOST:PID of each rank.
    places: tuple[str, ...]
    failures: int
    # Of an elastic trial: from the last loss that was known to the first report after it.
    change_s: float


class Training:
    """The trial under way."""

    def __init__(self, lab: Lab, log: Path, *, timeout_s: float) -> None:
        self.lab, self.timeout_s, self._log = lab, timeout_s, log

    @property
    def in_time_s(self) -> float:
        """How many seconds a failure may take to be reported.

        `timeout_s`, a quarter of it between two looks, then the look for the cause and the end of the others.
        """
        return self.timeout_s + 15.0

    def seen(self) -> list[Seen]:
        pattern = r"^([\d.]+) SAW step (\d+) hosts (.*) failures (\d+) change ([\d.]+)$"
        found = re.findall(pattern, self._log.read_text(), re.M)
        return [
            Seen(float(time_s), int(step), tuple(hosts.split()), int(failures), float(change_s))
            for time_s, step, hosts, failures, change_s in found
        ]

    @property
    def step(self) -> int:
        return self.seen()[-1].step

    @property
    def hosts(self) -> list[str]:
        return [place.split(":")[0] for place in self.seen()[-1].places]

    @property
    def processes(self) -> list[int]:
        return [int(place.split(":")[1]) for place in self.seen()[-1].places]

    def wait_for_step(self, step: int, *, timeout_s: float) -> None:
        try:
            wait_until(lambda: self.seen() and self.step >= step, timeout_s=timeout_s, what=f"step {step}")
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self._log.read_text()[-6000:]}") from late

    def errors(self) -> list[str]:
        """Every failure in Tune's error file, those that were not counted too, in order."""
        shown = self.lab.run(
            "n1", ["sh", "-c", "cat ~/ray_results/steady/*/error.txt"], timeout_s=60, check=False
        )
        return shown.stdout.split("Failure # ")[1:]

    def wait_for_failure(self, who: str, *, after: int, more_s: float = 0.0) -> None:
        """Wait until Tune's error file, which held `after` failures, holds one that names who was lost.

        One before it may be a start that took longer than `timeout_s` on a busy machine.
        """

        def named() -> bool:
            return any(re.search(who, error) for error in self.errors()[after:])

        try:
            wait_until(named, timeout_s=self.in_time_s + more_s, what=f"a failure that names {who}")
        except AssertionError as late:
            raise AssertionError(f"{late}\n{''.join(self.errors())[-3000:]}") from late

    def counted_failures(self) -> int:
        """How many failures Tune has counted, starts that were too slow aside."""
        return self.seen()[-1].failures - sum("StartFailed" in error for error in self.errors())

    def wait_for_progress(self, *, without: str | None = None, timeout_s: float = RESTART_S) -> float:
        """Wait until the trial has got past where it is, on hosts without one; return the seconds."""
        step, reports = self.step, len(self.seen())
        return wait_until(
            lambda: len(self.seen()) > reports and self.step > step and without not in self.hosts,
            timeout_s=timeout_s,
            what=f"the trial to continue without {without}",
        )


@contextmanager
def steady_training(
    lab: Lab, log: Path, *, timeout_s: float, min_workers: int | None = None
) -> Iterator[Training]:
    """Train on a lab whose Ray is up; at the end everything that the trial held must be free again.

    With `min_workers` it is an elastic trial of three ranks.
    """
    words = f"{JOB} {timeout_s} {'' if min_workers is None else min_workers}"
    driver = lab.start("n1", ["bash", "-lc", f"exec python {words}"], log)
    try:
        training = Training(lab, log, timeout_s=timeout_s)
        training.wait_for_step(3, timeout_s=400)
        yield training
        lab.run("n1", "touch /shared/stop", timeout_s=30)
        assert driver.wait(timeout=180) == 0, log.read_text()[-4000:]
        assert re.search(r"^ENDED errors 0$", log.read_text(), re.M)
        assert re.search(r"^CPUS ([\d.]+) free of \1$", log.read_text(), re.M), log.read_text()[-500:]
    except subprocess.TimeoutExpired:
        raise AssertionError(f"the driver does not end\n{log.read_text()[-4000:]}") from None
    finally:
        driver.kill()
        driver.wait(timeout=20)
