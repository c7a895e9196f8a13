"""A checkpoint on a disk that only the driver's host reads, and ranks on two others that continue from it."""

from __future__ import annotations

import json

import pytest
from lab import REPOSITORY, Lab

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200), pytest.mark.usefixtures("hosts_possible")]
JOB = REPOSITORY / "tests/cluster/jobs/copied_checkpoints.py"


def test_every_host_has_one_whole_copy_for_its_ranks_and_keeps_none() -> None:
    with Lab(3) as lab:
        lab.start_ray(head_cpus=0, cpus=2, environment="RAY_CHDIR_TO_TRIAL_DIR=0;")
        output = lab.run("n1", f"exec python {JOB}", timeout_s=600).stdout
    (line,) = [line for line in output.splitlines() if line.startswith("TOLD ")]
    told = json.loads(line.removeprefix("TOLD "))
    assert "rank 3 of 4 on n" in told["error"] and "died" in told["error"], "not on rank 0's host"
    by_host: dict[str, list[str]] = {}
    for host, directory, sums, copies, own in told["seen"]:
        assert sums == [told["checksum"]], "the file, and the same through a directory that was a link"
        assert len(copies) == 1 and directory.endswith(copies[0])
        assert not [name for name in own if "checkpoint" in name or "copy" in name], "the user's own folder"
        by_host.setdefault(host, []).append(directory)
    assert sorted(by_host) == ["n2", "n3"]
    assert all(len(directories) == 2 and len(set(directories)) == 1 for directories in by_host.values())
    assert told["left"] == {"n1": [], "n2": [], "n3": []}, "copies and parts of them end with their ranks"
