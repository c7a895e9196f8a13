"""A checkpoint on a disk that only the driver's host reads, and ranks on two others that continue from it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lab import REPOSITORY, Lab

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200), pytest.mark.usefixtures("hosts_possible")]
JOB = REPOSITORY / "tests/cluster/jobs/copied_checkpoints.py"


@pytest.fixture(scope="module")
def told() -> Any:
    with Lab(3) as lab:
        lab.start_ray(head_cpus=0, cpus=2, environment="RAY_CHDIR_TO_TRIAL_DIR=0;")
        output = lab.run("n1", f"exec python {JOB}", timeout_s=600).stdout
    (line,) = [line for line in output.splitlines() if line.startswith("TOLD ")]
    return json.loads(line.removeprefix("TOLD "))


def test_a_death_on_another_host_than_rank_zeros_is_named(told: Any) -> None:
    assert "rank 3 of 4 on n" in told["error"] and "died" in told["error"], told["error"]


def test_every_host_has_one_whole_copy_for_all_of_its_ranks(told: Any) -> None:
    by_host: dict[str, list[Any]] = {}
    for host, directory, sums, copies, _ in told["seen"]:
        assert sums == [told["checksum"]], "the file, and the same through a directory that was a link"
        assert len(copies) == 1 and directory.endswith(copies[0])
        by_host.setdefault(host, []).append(directory)
    assert sorted(by_host) == ["n2", "n3"]
    assert all(len(directories) == 2 and len(set(directories)) == 1 for directories in by_host.values())


def test_no_copy_is_in_the_users_own_folder(told: Any) -> None:
    assert not [name for *_, own in told["seen"] for name in own if "checkpoint" in name or "copy" in name]


def test_no_copy_and_no_part_of_one_outlives_its_ranks(told: Any) -> None:
    assert told["left"] == {"n1": [], "n2": [], "n3": []}
