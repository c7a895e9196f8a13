"""The test bed itself: what the other tests of this folder take for granted."""

from __future__ import annotations

import pytest
from lab import Lab, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("hosts_possible")]


def test_hosts_reach_each_other_and_nothing_else() -> None:
    with Lab(2) as lab:
        ssh = "ssh -i ~/.ssh/id_nc -o StrictHostKeyChecking=no n2 hostname"
        assert lab.run("laptop", ssh, timeout_s=90).stdout.splitlines()[-1] == "n2"
        assert lab.run("n1", ["hostname", "-i"], timeout_s=30).stdout.strip() == lab.ip("n1")
        lab.cut("n2")

        def reached() -> bool:
            probe = "timeout 2 bash -c '</dev/tcp/n2/22'"
            return not lab.run("n1", probe, timeout_s=30, check=False).returncode

        assert not reached()
        lab.heal("n2")
        # Not at once: n1 still asks for the address that nobody answered for, and gives up on it first.
        wait_until(reached, timeout_s=60, what="n2 to be back")
        links = lab.run("laptop", ["ip", "-br", "link"], timeout_s=30).stdout.split()
        assert not [link for link in links[::4] if link.startswith("eth")], (
            "the lab reaches this machine's network"
        )
