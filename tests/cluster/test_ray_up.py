"""The steps of `docs/clusters.md` for machines of one's own, taken from the page and typed on hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Lab, page_steps, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), pytest.mark.usefixtures("jobs_possible")]
RAY_PROCESSES = "raylet|gcs_server|ray::|monitor.py|dashboard|start_worker"
FOUND = [(host, "data arrived") for host in ("n1", "n2", "n3")]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(3, jobs=True) as lab:
        changes = {
            "192.168.0.10": lab.ip("n1"),
            "192.168.0.11": lab.ip("n2"),
            "192.168.0.12": lab.ip("n3"),
            "ssh_user: ubuntu": "ssh_user: root",
            "~/.ssh/id_ed25519": "~/.ssh/id_nc",
        }
        lab.prepare_laptop("on-premise.yaml", changes)
        yield lab


def test_a_job_outlives_the_laptop_that_submitted_it_and_its_results_come_back(
    lab: Lab, tmp_path: Path
) -> None:
    steps = page_steps()
    start, forward = steps["Start"].rsplit("ray dashboard", 1)
    log = tmp_path / "logs"
    with lab.running("laptop", f"cd ~/checkout; {start}", tmp_path / "up") as up:
        assert up.wait(timeout=480) == 0, (tmp_path / "up").read_text()[-6000:]
    forward = f"cd ~/checkout; exec ray dashboard{forward}"
    settings, submit, follow, status = steps["Submit and watch"].strip().splitlines()
    submit = submit.replace("tune.py --address auto", "search.py --address auto --until /shared/enough")
    here = f"cd ~/project; {settings}; "

    with lab.running("laptop", forward, tmp_path / "forward"):
        lab.wait_for_port("laptop", "127.0.0.1:8265")
        said = lab.run("laptop", here + submit, timeout_s=120).stdout
        assert "Job 'mine' submitted successfully" in said
        refused = lab.run("laptop", "RAY_AUTH_MODE=disabled " + status, timeout_s=60, check=False)
        assert refused.returncode, "no token, no answer"
        with lab.running("laptop", here + "exec " + follow, log) as follower:
            wait_until(
                lambda: "tick 1\n" in log.read_text() or follower.poll() is not None,
                timeout_s=300,
                what="the search",
            )
    # Both are gone: the terminal was closed. On every host a rank found the script's folder.
    assert f"best {{'x': 1.0}} found {FOUND} errors 0" in log.read_text(), log.read_text()[-6000:]
    seen = int(re.findall(r"tick (\d+)", log.read_text())[-1])

    with lab.running("laptop", forward, tmp_path / "again"):
        lab.wait_for_port("laptop", "127.0.0.1:8265")
        assert "RUNNING" in lab.run("laptop", here + status, timeout_s=60).stdout
        logs = here + follow.replace(" -f", "")
        wait_until(
            lambda: f"tick {seen + 5}\n" in lab.run("laptop", logs, timeout_s=60).stdout,
            timeout_s=60,
            what="what the job printed since",
        )
        lab.run("n1", "touch /shared/enough", timeout_s=30)
        wait_until(
            lambda: "Job 'mine' failed" in lab.run("laptop", here + status, timeout_s=60).stdout,
            timeout_s=60,
            what="the exit status of the script, which is 3",
        )
    fetch, down = steps["Results, then the end"].strip().splitlines()
    lab.run("laptop", f"cd ~/checkout; {fetch}", timeout_s=120)
    results = lab.run("laptop", "ls ~/checkout/ray_results/project/*/result.json", timeout_s=30).stdout
    assert len(results.split()) == 3, results
    lab.run("laptop", f"cd ~/checkout; {down}", timeout_s=180)
    for host in lab.hosts:
        wait_until(
            lambda host=host: not lab.processes(host, RAY_PROCESSES),
            timeout_s=120,
            what=f"{host} without Ray",
        )
