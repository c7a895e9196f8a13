"""`cluster/slurm.sbatch` on a real Slurm of three nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import REPOSITORY, Lab, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), pytest.mark.usefixtures("slurm_possible")]
SBATCH = REPOSITORY / "cluster" / "slurm.sbatch"
JOBS = REPOSITORY / "tests/cluster/jobs"
RAY_PROCESSES = "raylet|gcs_server|ray::|ray start|monitor.py"


class Slurm:
    """The login node, n1."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    def submit(self, options: str, command: str) -> int:
        words = f"cd /shared && sbatch --parsable {options} {SBATCH} {command}"
        return int(self.lab.run("n1", words, timeout_s=30).stdout)

    def state(self, job: int) -> str:
        shown = self.lab.run("n1", f"scontrol show job {job}", timeout_s=20).stdout
        found = re.search(r"JobState=(\w+)", shown)
        assert found, shown
        return found[1]

    def exit_code(self, job: int) -> str:
        shown = self.lab.run("n1", f"scontrol show job {job}", timeout_s=20).stdout
        return re.search(r" ExitCode=(\S+)", shown)[1]

    def log(self, job: int) -> str:
        logs = f"cat /shared/horovod-tune-{job}.log /shared/horovod-tune-{job}.ray.log"
        return self.lab.run("n1", logs, timeout_s=20, check=False).stdout

    def wait_for_end(self, job: int, *, timeout_s: float) -> str:
        try:
            wait_until(
                lambda: self.state(job) not in ("PENDING", "RUNNING", "COMPLETING"),
                timeout_s=timeout_s,
                what=f"job {job} to end",
            )
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.log(job)}") from late
        return self.state(job)

    def leftovers(self) -> list[str]:
        return [
            f"{host}: {line}" for host in self.lab.hosts for line in self.lab.processes(host, RAY_PROCESSES)
        ]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with Lab(3, slurm_cpus=2) as lab:
        yield Slurm(lab)


def test_two_jobs_share_nodes_and_each_ends_with_its_own_exit_code(slurm: Slurm, tmp_path: Path) -> None:
    search = f"python {JOBS}/plain_search.py --hosts 3 --storage /shared/{{}}"
    first = slurm.submit("--nodes=3 --cpus-per-task=1", search.format("first"))
    # The other one as a person does it: launched, followed, and its exit code is the command's.
    launch = "cd /shared && horovod-tune launch slurm --nodes 3 --cpus-per-task 1"
    words = f"{launch} -- bash -c '{search.format('second')} && exit 3'"
    log = tmp_path / "launch.log"
    follower = slurm.lab.start("n1", ["bash", "-lc", words], log)
    wait_until(lambda: "Job " in log.read_text(), timeout_s=60, what="the launch to submit")
    second = int(re.search(r"^Job (\d+)\.", log.read_text(), re.M)[1])
    wait_until(
        lambda: {slurm.state(first), slurm.state(second)} == {"RUNNING"},
        timeout_s=30,
        what="both jobs running",
    )
    assert slurm.wait_for_end(first, timeout_s=120) == "COMPLETED", slurm.log(first)
    assert follower.wait(timeout=120) == 3, log.read_text()[-4000:]
    assert slurm.state(second) == "FAILED" and slurm.exit_code(second) == "3:0"
    for output in (slurm.log(first), log.read_text()):
        assert "best_config {'x': 1.0} hosts n1 n2 n3 errors 0" in output
    assert slurm.leftovers() == []


def test_a_requeued_job_continues_the_experiment_where_it_was(slurm: Slurm) -> None:
    slurm.lab.run("n1", "mkdir /shared/requeue", timeout_s=10)
    job = slurm.submit("--nodes=2 --export=ALL,STORAGE=/shared/requeue", f"python {JOBS}/counting_search.py")
    steps = lambda: slurm.lab.run("n1", "cat /shared/requeue/steps.txt", timeout_s=10, check=False).stdout  # noqa: E731
    wait_until(lambda: steps().count("\n") >= 4, timeout_s=90, what="a few iterations")
    # What Slurm does near the time limit.
    slurm.lab.run("n1", f"scancel --batch --signal=USR1 {job}", timeout_s=20)
    wait_until(lambda: "requeueing" in slurm.log(job), timeout_s=60, what="the job to stop cleanly")
    # Slurm holds a requeued job back for two minutes.
    wait_until(lambda: slurm.state(job) == "PENDING", timeout_s=60, what="the job to be requeued")
    slurm.lab.run("n1", f"scontrol update jobid={job} StartTime=now", timeout_s=20, check=False)
    assert slurm.wait_for_end(job, timeout_s=200) == "COMPLETED", slurm.log(job)
    assert "steps [8, 8]" in slurm.log(job)
    ran = steps().split("\n")[:-1]
    # At most the step that was under way when the signal came is run twice.
    assert 16 <= len(ran) <= 18, ran
    assert slurm.leftovers() == []


def test_scancel_leaves_nothing(slurm: Slurm) -> None:
    slurm.lab.run("n1", "mkdir /shared/cancelled", timeout_s=10)
    job = slurm.submit(
        "--nodes=3 --exclusive --export=ALL,STORAGE=/shared/cancelled,ITERATIONS=1000",
        f"python {JOBS}/counting_search.py",
    )
    wait_until(
        lambda: (
            slurm.lab.run("n1", "cat /shared/cancelled/steps.txt", timeout_s=10, check=False).returncode == 0
        ),
        timeout_s=90,
        what="the first iteration",
    )
    slurm.lab.run("n1", f"scancel {job}", timeout_s=20)
    assert slurm.wait_for_end(job, timeout_s=60) == "CANCELLED"
    wait_until(lambda: not slurm.leftovers(), timeout_s=30, what="all nodes without Ray")
    for host in slurm.lab.hosts:
        left = slurm.lab.run(host, f"ls -d /tmp/horovod-tune-{job}", timeout_s=10, check=False)
        assert left.returncode, f"{host} keeps {left.stdout}"
