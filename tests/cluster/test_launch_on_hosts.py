"""`horovod-tune launch local` on three hosts, as it happens to people: the network goes, terminals close,
others launch too. Nothing of that ends a job; results come before machines go.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import REPOSITORY, Lab, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500), pytest.mark.usefixtures("jobs_possible")]
RAY_PROCESSES = "raylet|gcs_server|ray::|monitor.py|dashboard|start_worker|node.autostop"
# What a cluster's start may take on a machine that is busy elsewhere.
START_S = 480.0


class Laptop:
    """Where people type."""

    def __init__(self, lab: Lab, logs: Path) -> None:
        self.lab, self._logs = lab, logs
        self.hosts = ",".join(map(lab.ip, lab.hosts))
        lab.run("laptop", f"cp -r {REPOSITORY}/tests/cluster/jobs/launched ~/project", timeout_s=60)

    def types(self, command: str, *, timeout_s: float = 200) -> subprocess.CompletedProcess[str]:
        return self.lab.run("laptop", f"cd ~/project; {command}", timeout_s=timeout_s, check=False)

    def starts(self, command: str, name: str) -> tuple[subprocess.Popen[bytes], Path]:
        log = self._logs / f"{name}.log"
        line = f"cd ~/project; exec horovod-tune {command}"
        return self.lab.start("laptop", ["bash", "-lc", line], log), log

    def launch_line(self, options: str, script: str) -> str:
        ssh = "--ssh-user root --ssh-key ~/.ssh/id_nc"
        return f"launch local --hosts {self.hosts} {ssh} {options} -- python search.py {script}"

    def signals(self, pattern: str, number: signal.Signals) -> None:
        self.lab.run("laptop", ["pkill", f"-{int(number)}", "-f", pattern], timeout_s=30)

    def wait_until_free(self) -> None:
        for host in self.lab.hosts:
            wait_until(
                lambda host=host: not self.lab.processes(host, RAY_PROCESSES),
                timeout_s=180,
                what=f"{host} without Ray",
            )
            left = self.lab.run(host, "cat ~/.horovod-tune/claim.json", timeout_s=30, check=False)
            assert left.returncode, f"{host} keeps {left.stdout}"


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    with Lab(3, jobs=True) as lab:
        lab.give_job_packages("n1")
        yield Laptop(lab, tmp_path_factory.mktemp("logs"))


def wait_for(log: Path, text: str, process: subprocess.Popen[bytes], *, timeout_s: float = START_S) -> None:
    def there() -> bool:
        assert text in log.read_text() or process.poll() is None, log.read_text()[-6000:]
        return text in log.read_text()

    try:
        wait_until(there, timeout_s=timeout_s, what=repr(text))
    except AssertionError as late:
        raise AssertionError(f"{late}\n{log.read_text()[-6000:]}") from late


def test_a_job_outlives_the_network_the_terminal_and_other_launches(laptop: Laptop) -> None:
    script = "--storage /var/tmp/elsewhere --until /shared/enough --exit-code 3"
    first, log = laptop.starts(laptop.launch_line("--name first", script), "first")
    try:
        wait_for(log, "tick 1\n", first)
        # The module and the data beside the script are on every host.
        assert "searched: {'data arrived'} errors 0" in log.read_text(), log.read_text()[-4000:]

        refused = laptop.types("horovod-tune " + laptop.launch_line("--name second", ""))
        assert refused.returncode == 2
        for host in laptop.lab.hosts:
            used = (
                rf"{laptop.lab.ip(host)} is in use by the launch first \(python search.py .*\) of root@laptop"
            )
            assert re.search(used, refused.stdout), refused.stdout

        # The laptop's network is away.
        drop = "iptables -I INPUT -i br0 -j DROP; iptables -I OUTPUT -o br0 -j DROP"
        laptop.lab.run("laptop", drop, timeout_s=30)
        try:
            wait_for(log, "[reconnecting", first, timeout_s=120)
        finally:
            laptop.lab.run("laptop", "iptables -F", timeout_s=30)
        wait_for(log, "[connected again]", first, timeout_s=120)

        # Ctrl-C says how to come back.
        laptop.signals("bin/horovod-tune launch", signal.SIGINT)
        assert first.wait(timeout=60) == 130, log.read_text()[-4000:]
        assert "Come back: horovod-tune attach first" in log.read_text()
        assert "Stop it: horovod-tune stop first" in log.read_text()
    finally:
        first.kill()
        first.wait(timeout=20)
    assert laptop.lab.processes("n1", "raylet")
    status = laptop.types("horovod-tune list").stdout
    assert re.search(r"^first  local  .* old  running; up: 3 machines of yours", status, re.M), status
    refused = laptop.types("horovod-tune down first")
    assert refused.returncode == 1 and "has results that are not here" in refused.stdout

    # Another terminal, which is closed.
    second, log_again = laptop.starts("attach first", "again")
    wait_for(log_again, "tick", second, timeout_s=120)
    laptop.signals("bin/horovod-tune attach", signal.SIGHUP)
    second.wait(timeout=60)
    assert laptop.lab.processes("n1", "raylet")

    # And another, which sees the end.
    laptop.lab.run("n1", "touch /shared/enough", timeout_s=30)
    attached = laptop.types("horovod-tune attach first", timeout_s=300)
    assert attached.returncode == 3, attached.stdout[-4000:]
    assert "script ends" in attached.stdout and "The cluster is down" in attached.stdout
    ticks = re.findall(r"^tick (\d+)$", log.read_text() + log_again.read_text() + attached.stdout, re.M)
    numbers = list(map(int, ticks))
    # Nothing twice but what a closed terminal had been shown and not noted; nothing missing.
    assert sorted(set(numbers)) == list(range(1, max(numbers) + 1)), numbers
    assert len(laptop.types("ls ray_results/launched/*/result.json").stdout.split()) == 4
    # Few lines of its own: the rest is in the log.
    own = [line for line in log.read_text().splitlines() if not line.startswith("tick")]
    assert (
        len([line for line in own if re.match(r"Bringing|The head|Running as|\[|Detached|Come", line)]) <= 12
    )
    laptop.wait_until_free()


def test_a_cluster_whose_laptop_never_comes_back_ends_itself(laptop: Laptop) -> None:
    launched, log = laptop.starts(
        laptop.launch_line("--name lonely --autostop 0.2", "--until /shared/later"), "l"
    )
    try:
        wait_for(log, "tick 1\n", launched)
    finally:
        laptop.signals("bin/horovod-tune launch", signal.SIGKILL)
        launched.wait(timeout=20)
    laptop.lab.run("n1", "touch /shared/later", timeout_s=30)
    laptop.wait_until_free()
    said = laptop.lab.run("n1", "cat ~/.horovod-tune/autostop.log", timeout_s=30).stdout
    assert "ending the cluster: the last job ended 0 min ago and its results were not fetched" in said
    # The machines are the user's own, and so the results are still there.
    fetched = laptop.types("rm -rf ray_results; horovod-tune fetch lonely")
    assert fetched.returncode == 0, fetched.stdout
    assert len(laptop.types("ls ray_results/launched/*/result.json").stdout.split()) == 4
    assert laptop.types("horovod-tune down lonely").returncode == 0
    assert "nothing is up" in laptop.types("horovod-tune list").stdout
