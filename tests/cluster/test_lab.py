"""The test bed itself: what the other tests of this folder take for granted."""

from __future__ import annotations

import pytest
from lab import Lab

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("hosts_possible")]


def test_hosts_reach_each_other_and_nothing_else() -> None:
    with Lab(2) as lab:
        ssh = "ssh -i ~/.ssh/id_nc -o StrictHostKeyChecking=no -o ConnectTimeout=5 n2 hostname"
        assert lab.run("laptop", ssh, timeout_s=20).stdout.splitlines()[-1] == "n2"
        assert lab.run("n1", ["hostname", "-i"], timeout_s=10).stdout.strip() == lab.ip("n1")
        lab.cut("n2")
        assert lab.run("n1", "timeout 2 bash -c '</dev/tcp/n2/22'", timeout_s=10, check=False).returncode
        lab.heal("n2")
        lab.run("n1", "timeout 5 bash -c '</dev/tcp/n2/22'", timeout_s=10)
        links = lab.run("laptop", ["ip", "-br", "link"], timeout_s=10).stdout.split()
        assert not [link for link in links[::4] if link.startswith("eth")], (
            "the lab reaches this machine's network"
        )
