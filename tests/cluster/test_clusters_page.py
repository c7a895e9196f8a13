"""The steps of `docs/clusters.md` for machines of one's own, taken from the page and typed on hosts."""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import REPOSITORY, Lab, wait_until
from laptop import Laptop, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), pytest.mark.usefixtures("jobs_possible")]
PAGE = REPOSITORY / "docs" / "clusters.md"
# What the page calls the user's: an address, a user, a key.
HEAD, USER, KEY = "192.168.0.10", "me@", "~/.ssh/id_ed25519"


def steps(lab: Lab) -> dict[str, str]:
    """Return the page's blocks by their titles, with the addresses of these hosts."""
    blocks = re.findall(r'^```bash title="(.+?)"\n(.*?)^```', PAGE.read_text(), re.M | re.S)
    assert blocks
    return {
        title.split(",")[0].split(":")[0]: lines.replace(HEAD, lab.ip("n1"))
        .replace(USER, "root@")
        .replace(KEY, "~/.ssh/id_nc")
        for title, lines in blocks
    }


def script() -> str:
    """Return the first program of README.md, changed as README.md and the page say for a cluster."""
    (text,) = re.findall(
        r'^```python title="first.py"\n(.*?)^```', (REPOSITORY / "README.md").read_text(), re.M | re.S
    )
    changes = {
        'ray.init("local")': "ray.init(parser.parse_args().address)",
        "num_slots=2": "num_hosts=3",
        "import horovod.torch as hvd\n": textwrap.dedent("""\
            import argparse
            import horovod.torch as hvd
            parser = argparse.ArgumentParser()
            parser.add_argument("--address")
        """),
        "num_samples=12": "num_samples=3",  # this machine is all three hosts
    }
    for was, now in changes.items():
        assert was in text, was
        text = text.replace(was, now)
    return text


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(3, jobs=True) as lab:
        lab.give_job_packages("n1")
        for host in ("n1", "laptop"):
            lab.put(host, "~/tune.py", script())
        yield lab


def a_job_is_begun_and_left(laptop: Laptop, line: str, name: str) -> str:
    """Launch a job that ends when /shared/enough is there, and detach; returns the launch's line."""
    for was, now in {
        "horovod-tune launch": "launch",
        "--head": f"--name {name} --head",
        "tune.py --address auto": "search.py --until /shared/enough --exit-code 3",
    }.items():
        assert was in line, line
        line = line.replace(was, now)
    launch, log = laptop.starts(line, name)
    try:
        wait_for(log, "tick 1\n", launch)
        laptop.signals("bin/horovod-tune launch", signal.SIGINT)
        assert launch.wait(timeout=60) == 130, log.read_text()[-4000:]
    finally:
        launch.kill()
        launch.wait(timeout=20)
    assert f"Come back: horovod-tune attach {name}" in log.read_text()
    return line


def a_job_is_given_up(laptop: Laptop, line: str) -> None:
    laptop.lab.run("n1", "rm -f /shared/enough", timeout_s=30)
    a_job_is_begun_and_left(laptop, line, "unwanted")
    assert laptop.lab.processes("n1", "search.py")
    refused = laptop.types("horovod-tune down unwanted")
    assert refused.returncode == 1 and "has results that are not here" in refused.stdout, refused.stdout
    assert laptop.lab.processes("n1", "search.py"), "a job whose results are not here goes on"
    down = laptop.types("horovod-tune down --lose-results unwanted")
    assert down.returncode == 0, down.stdout
    wait_until(lambda: not laptop.lab.processes("n1", "search.py"), timeout_s=60, what="the job's end")
    assert "nothing is up" in laptop.types("horovod-tune list").stdout


def a_job_is_left_and_found_again(laptop: Laptop, line: str) -> None:
    line = a_job_is_begun_and_left(laptop, line, "mine")
    assert "running; on the cluster of root@" in laptop.types("horovod-tune status mine").stdout
    assert "tick 1\n" in laptop.types("horovod-tune logs mine").stdout
    again = laptop.types(f"horovod-tune {line}")
    assert again.returncode == 2 and "--name mine is in use" in again.stdout, again.stdout
    assert "The results so far are in" in laptop.types("horovod-tune fetch mine").stdout

    laptop.lab.run("n1", "touch /shared/enough", timeout_s=30)
    attached = laptop.types("horovod-tune attach mine")
    assert attached.returncode == 3 and "script ends" in attached.stdout, attached.stdout
    assert len(laptop.types("ls ray_results/launched/*/result.json").stdout.split()) == 4
    assert "nothing is up" in laptop.types("horovod-tune list").stdout


def test_the_pages_steps_make_a_cluster_run_the_search_and_leave_nothing(lab: Lab, tmp_path: Path) -> None:
    page = steps(lab)
    assert list(page) == [
        "On the first machine", "On each of the others", "On the head", "On your laptop", "On each machine",
    ]  # fmt: skip
    lab.run("n1", page["On the first machine"], timeout_s=120)
    for host in lab.hosts[1:]:
        lab.run(host, page["On each of the others"], timeout_s=120)
    said = lab.run("n1", f"set -e; cd\n{page['On the head']}", timeout_s=300).stdout
    assert "3 of 3 trials ended" in said and "best config" in said, said

    # The same as a job, from a machine that is not in the cluster.
    launched = lab.run("laptop", f"cd\n{page['On your laptop']}", timeout_s=300).stdout
    assert "The job is over: succeeded, exit status 0" in launched, launched
    assert "3 of 3 trials ended" in launched
    assert len(lab.run("laptop", "ls ~/ray_results/*/*/result.json", timeout_s=30).stdout.split()) == 3
    assert "nothing is up" in lab.run("laptop", "horovod-tune list", timeout_s=60).stdout
    laptop = Laptop(lab, tmp_path)
    a_job_is_left_and_found_again(laptop, page["On your laptop"])
    a_job_is_given_up(laptop, page["On your laptop"])
    assert lab.processes("n1", "raylet"), "the cluster is not the launch's to end"

    for host in lab.hosts:
        lab.run(host, page["On each machine"], timeout_s=120)
    for host in lab.hosts:
        wait_until(
            lambda host=host: not lab.processes(host, "raylet|gcs_server|ray::"),
            timeout_s=60,
            what=f"{host} without Ray",
        )


def test_a_head_without_the_job_system_is_said_before_anything_travels(lab: Lab) -> None:
    # Only n1 was given what `ray[default]` brings.
    line = f"horovod-tune launch running --head root@{lab.ip('n2')} --ssh-key ~/.ssh/id_nc -- python tune.py"
    refused = lab.run("laptop", f"cd; {line}", timeout_s=120, check=False)
    assert refused.returncode == 2 and "ray[default]" in refused.stdout, refused.stdout
    assert "nothing is up" in lab.run("laptop", "horovod-tune list", timeout_s=60).stdout
