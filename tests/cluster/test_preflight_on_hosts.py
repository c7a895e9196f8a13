"""The preflight on real hosts, each with something else wrong; each is named."""

from __future__ import annotations

import json

import pytest
from lab import Lab

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200), pytest.mark.usefixtures("hosts_possible")]

LOOK = """
import dataclasses, json, sys
import ray
from horovod_tune.doctor.nodes import check
ray.init(address="auto", log_to_driver=False)
nics = json.loads(sys.argv[1])
report = check(["json", "sklearn.datasets"], timeout_s=240, nics=nics)
print(report)
print(json.dumps({
    "ok": report.ok,
    "problems": [dataclasses.asdict(problem) for problem in report.findings],
    "addresses": {node.label: node.interface_address for node in report.nodes},
}))
"""

PACKAGES = "$(python -c 'import torch, os; print(os.path.dirname(os.path.dirname(torch.__file__)))')"


def test_each_host_with_a_problem_is_named() -> None:
    with Lab(4, nics=2) as lab:
        # n3: no Horovod, and n2 cannot reach it on the interface that is asked for.
        without = (
            f"p={PACKAGES}; mkdir /mnt/o; mount -t tmpfs none /mnt/o; mkdir /mnt/o/u /mnt/o/w;"
            "mount -t overlay none -o lowerdir=$p,upperdir=/mnt/o/u,workdir=/mnt/o/w $p;"
            "rm -rf $p/horovod $p/horovod-*;"
            f"iptables -I INPUT -s {lab.ip('n2').replace('10.77.', '10.88.')} -j DROP"
        )
        lab.run("n3", without, timeout_s=60)
        # n4: another torch, and no second interface.
        older = (
            f"v={PACKAGES}/torch/version.py; sed 's/2.13.0/2.12.1/' $v > /tmp/v; mount --bind /tmp/v $v;"
            "ip link del eth1"
        )
        lab.run("n4", older, timeout_s=60)
        lab.start_ray()
        words = ["bash", "-lc", 'python -c "$0" "$1"', LOOK, json.dumps(["eth1"])]
        table = lab.run("n1", words, timeout_s=300).stdout
        doctor = lab.run("n1", "horovod-tune doctor --address auto", timeout_s=300, check=False)
    found = json.loads(table.strip().splitlines()[-1])
    problems: dict[str, str] = {"n1": "", "n2": "", "n3": "", "n4": ""}
    for problem in found["problems"]:
        assert problem["cure"]
        problems[problem["node"]] += problem["what"]
        assert (problem["node"], problem["level"]) != ("n1", "problem")
    assert not found["ok"]
    assert "Horovod is not installed" in problems["n3"], table
    assert "cannot be reached from n2 at 10.88.0.13" in problems["n3"], table
    assert "It has torch 2.12.1; n1 n2 n3 have 2.13.0" in problems["n4"], table
    assert "nics=['eth1'] names no interface" in problems["n4"], table
    # The collectives take the interface that is named.
    addresses = {"n1": "10.88.0.11", "n2": "10.88.0.12", "n3": "10.88.0.13", "n4": None}
    assert found["addresses"] == addresses, table
    # The doctor says the same.
    assert doctor.returncode == 1, doctor.stdout
    assert "n3: Horovod is not installed" in doctor.stdout
    assert "A trial across these 4 machines cannot run." in doctor.stdout
