"""`horovod-tune launch local` on three hosts, as it happens to people: the network goes, terminals close,
others launch too. Nothing of that ends a job; results come before machines go.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import pytest
from lab import REPOSITORY, Lab, wait_until
from laptop import Laptop, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1500), pytest.mark.usefixtures("jobs_possible")]
RAY_PROCESSES = "raylet|gcs_server|ray::|monitor.py|dashboard|start_worker|node.autostop"


@pytest.fixture(scope="module")
def laptop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laptop]:
    with Lab(3, jobs=True) as lab:
        lab.give_job_packages("n1")
        yield Laptop(lab, tmp_path_factory.mktemp("logs"))


def launch_line(laptop: Laptop, options: str, script: str) -> str:
    """Return the line of `docs/clusters.md`, with these machines and this script."""
    page = (REPOSITORY / "docs" / "clusters.md").read_text()
    (line,) = re.findall(r"^    horovod-tune (launch local .*)$", page, re.M)
    for was, now in {
        "192.168.0.10,192.168.0.11,192.168.0.12": ",".join(map(laptop.lab.ip, laptop.lab.hosts)),
        "--ssh-user me": f"--ssh-user root --ssh-key ~/.ssh/id_nc {options}",
        "tune.py --address auto": f"search.py {script}",
    }.items():
        assert was in line, line
        line = line.replace(was, now)
    return line


def wait_until_free(laptop: Laptop) -> None:
    for host in laptop.lab.hosts:
        wait_until(
            lambda host=host: not laptop.lab.processes(host, RAY_PROCESSES),
            timeout_s=180,
            what=f"{host} without Ray",
        )
        left = laptop.lab.run(host, "cat ~/.horovod-tune/claim.json", timeout_s=30, check=False)
        assert left.returncode, f"{host} keeps {left.stdout}"


def test_a_job_outlives_the_network_the_terminal_other_launches_and_its_cluster_ends_without_a_laptop(
    laptop: Laptop,
) -> None:
    script = "--storage /var/tmp/elsewhere --until /shared/enough --exit-code 3"
    first, log = laptop.starts(launch_line(laptop, "--name first --autostop 0.2", script), "first")
    try:
        wait_for(log, "tick 1\n", first)
        # The module and the data beside the script are on every host.
        assert "searched: {'data arrived'} errors 0" in log.read_text(), log.read_text()[-4000:]

        refused = laptop.types("horovod-tune " + launch_line(laptop, "--name second", ""))
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

    # The job ends with nobody there, and after the grace time so does its cluster.
    laptop.lab.run("n1", "touch /shared/enough", timeout_s=30)
    wait_until_free(laptop)
    said = laptop.lab.run("n1", "cat ~/.horovod-tune/autostop.log", timeout_s=30).stdout
    assert "ending the cluster: the last job ended 0 min ago and its results were not fetched" in said

    # And another terminal, in the end. The machines are the user's own, and so all is still there.
    attached = laptop.types("horovod-tune attach first", timeout_s=300)
    assert attached.returncode == 3, attached.stdout[-4000:]
    assert "script ends" in attached.stdout and "The cluster is down" in attached.stdout
    ticks = re.findall(r"^tick (\d+)$", log.read_text() + log_again.read_text() + attached.stdout, re.M)
    numbers = list(map(int, ticks))
    # Nothing twice but what a closed terminal had been shown and not noted; nothing missing.
    assert sorted(set(numbers)) == list(range(1, max(numbers) + 1)), numbers
    assert len(laptop.types("ls ray_results/launched/*/result.json").stdout.split()) == 4
    assert "nothing is up" in laptop.types("horovod-tune list").stdout
    # Few lines of its own: the rest is in the log.
    own = [line for line in log.read_text().splitlines() if not line.startswith("tick")]
    assert (
        len([line for line in own if re.match(r"Bringing|The head|Running as|\[|Detached|Come", line)]) <= 12
    )
