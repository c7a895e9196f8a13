"""`cluster/slurm.sbatch` on a real Slurm of three nodes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import pytest
from lab import REPOSITORY, Lab, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200), pytest.mark.usefixtures("slurm_possible")]
SBATCH = REPOSITORY / "cluster" / "slurm.sbatch"
JOBS = REPOSITORY / "tests/cluster/jobs"
RAY_PROCESSES = "raylet|gcs_server|ray::|ray start|monitor.py"
# What a job's start, or its end, may take on a machine that is busy elsewhere.
JOB_S = 480.0


class Slurm:
    """The login node, n1."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab

    def run(self, command: str) -> str:
        return self.lab.run("n1", command, timeout_s=90).stdout

    def submit(self, options: str, command: str) -> int:
        return int(self.run(f"cd /shared && sbatch --parsable {options} {SBATCH} {command}"))

    def fact(self, job: int, name: str) -> str:
        shown = self.run(f"scontrol show job {job}")
        found = re.search(rf"(?:^|\s){name}=(\S+)", shown)
        assert found, shown
        return found[1]

    def state(self, job: int) -> str:
        return self.fact(job, "JobState")

    def log(self, job: int) -> str:
        logs = f"cat /shared/horovod-tune-{job}.log /shared/horovod-tune-{job}.ray.log"
        return self.lab.run("n1", logs, timeout_s=60, check=False).stdout

    def wait_for_end(self, job: int) -> str:
        try:
            wait_until(
                lambda: self.state(job) not in ("PENDING", "RUNNING", "COMPLETING"),
                timeout_s=JOB_S,
                what=f"job {job} to end",
            )
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.log(job)}") from late
        return self.state(job)

    def restart_later(self, job: int) -> None:
        """Wait until a job is requeued and runs; by itself Slurm would hold it back for two minutes."""

        def running() -> bool:
            state = self.state(job)
            if state == "PENDING":  # again and again: what is said while the job still completes is forgotten
                self.lab.run("n1", f"scontrol update jobid={job} StartTime=now", timeout_s=90, check=False)
            return state == "RUNNING" and self.fact(job, "Restarts") == "1"

        wait_until(running, timeout_s=JOB_S, what="the job to start again")

    def counted(self, storage: str) -> list[tuple[int, int, str]]:
        """The iterations that `counting_search.py` really ran: trial, step, hosts."""
        shown = self.lab.run("n1", f"cat {storage}/steps.txt", timeout_s=60, check=False).stdout
        found = re.findall(r"^(\d+) (\d+) (n\d.*)$", shown, re.M)
        return [(int(trial), int(step), hosts) for trial, step, hosts in found]

    def wait_for_steps(self, job: int, storage: str, count: int, *, on: str = "n1 n2") -> None:
        """Wait until both trials have run so many steps on these hosts."""

        def ran() -> bool:
            trials = [trial for trial, _, hosts in self.counted(storage) if hosts == on]
            return min(trials.count(1), trials.count(2)) >= count

        try:
            wait_until(ran, timeout_s=JOB_S, what=f"{count} iterations on {on}")
        except AssertionError as late:
            raise AssertionError(f"{late}\n{self.log(job)}") from late

    def wait_until_left(self, *hosts: str) -> None:
        wait_until(
            lambda: not any(self.lab.processes(host, RAY_PROCESSES) for host in hosts),
            timeout_s=60,
            what=f"{' '.join(hosts)} without Ray",
        )


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with Lab(3, slurm_cpus=2) as lab:
        yield Slurm(lab)


def test_two_jobs_share_nodes_and_each_ends_with_its_own_exit_code(slurm: Slurm) -> None:
    # Two searches of Horovod trials with a rank on each node; the second ends with an exit status of 3.
    options = "--address auto --num-hosts 3 --num-slots 1 --num-samples 2 --epochs 3"
    digits = f"python {REPOSITORY}/examples/bayesopt_digits.py {options} --storage-path /shared/first"
    first = slurm.submit("--nodes=3 --cpus-per-task=1", f"{digits} --resume digits")
    second = slurm.submit("--nodes=3 --cpus-per-task=1", f"python {JOBS}/project/search.py --address auto")
    assert slurm.wait_for_end(first) == "COMPLETED", slurm.log(first)
    assert slurm.wait_for_end(second) == "FAILED", slurm.log(second)
    assert slurm.fact(second, "ExitCode") == "3:0"
    assert "best_config: {'lr':" in slurm.log(first) and "held-out digits" in slurm.log(first)
    found = [(host, "data arrived") for host in slurm.lab.hosts]
    assert f"best {{'x': 1.0}} found {found} errors 0" in slurm.log(second)
    # Both at once: neither had ended when the other started.
    began = {job: slurm.fact(job, "StartTime") for job in (first, second)}
    assert max(began.values()) < min(slurm.fact(job, "EndTime") for job in (first, second)), began
    slurm.wait_until_left(*slurm.lab.hosts)


def test_a_requeued_job_continues_its_trials_from_their_checkpoints(slurm: Slurm) -> None:
    storage = "/shared/requeue"
    slurm.run(f"mkdir {storage}")
    job = slurm.submit(f"--nodes=2 --export=ALL,STORAGE={storage}", f"python {JOBS}/counting_search.py")
    slurm.wait_for_steps(job, storage, 2)
    # What Slurm does near the time limit.
    slurm.run(f"scancel --batch --signal=USR1 {job}")
    slurm.restart_later(job)
    assert slurm.wait_for_end(job) == "COMPLETED", slurm.log(job)
    assert "requeueing" in slurm.log(job) and "steps [8, 8]" in slurm.log(job)
    ran = Counter(slurm.counted(storage))
    assert set(ran) == {(trial, step, "n1 n2") for trial in (1, 2) for step in range(1, 9)}
    # At most the step of each trial that was under way when the signal came ran twice.
    assert sum(ran.values()) <= 18, ran
    slurm.wait_until_left(*slurm.lab.hosts)


def test_a_lost_node_requeues_the_job_elsewhere_and_scancel_leaves_nothing(slurm: Slurm) -> None:
    storage = "/shared/lost"
    slurm.run(f"mkdir {storage}")
    # Without a notice, what counts is when Tune last saved the experiment: every 10 s by default.
    exported = f"STORAGE={storage},ITERATIONS=1000,TUNE_GLOBAL_CHECKPOINT_S=1"
    job = slurm.submit(f"--nodes=2 --exclusive --export=ALL,{exported}", f"python {JOBS}/counting_search.py")
    slurm.wait_for_steps(job, storage, 6)
    slurm.lab.power_off("n2")
    # Slurm finds out by itself after SlurmdTimeout; this is an administrator who is quicker.
    slurm.run("scontrol update nodename=n2 state=down reason=lost")
    slurm.restart_later(job)
    slurm.wait_for_steps(job, storage, 1, on="n1 n3")
    for number in (1, 2):
        steps = [step for trial, step, hosts in slurm.counted(storage) if (trial, hosts) == (number, "n1 n2")]
        first = next(
            step for trial, step, hosts in slurm.counted(storage) if (trial, hosts) == (number, "n1 n3")
        )
        assert 1 < first <= max(steps) + 1, (steps, first)  # from a checkpoint, not from the start

    slurm.run(f"scancel {job}")
    assert slurm.wait_for_end(job) == "CANCELLED"
    slurm.wait_until_left("n1", "n3")
    for host in ("n1", "n3"):
        left = slurm.lab.run(host, f"ls -d /tmp/horovod-tune-{job}", timeout_s=30, check=False)
        assert left.returncode, f"{host} keeps {left.stdout}"
