"""`ray up cluster/on-premise.yaml` on three hosts, with only its addresses and key edited."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from lab import REPOSITORY, Lab, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200), pytest.mark.usefixtures("hosts_possible")]
RAY_PROCESSES = "raylet|gcs_server|ray::|monitor.py|dashboard"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(3) as lab:
        lab.check_out("laptop")
        edit_addresses(lab)
        yield lab


def edit_addresses(lab: Lab) -> None:
    """Do what the file's first lines ask for, and nothing else."""
    text = (REPOSITORY / "cluster" / "on-premise.yaml").read_text()
    for was, now in {
        "head_ip: 192.168.0.10 ": f"head_ip: {lab.ip('n1')} ",
        "[192.168.0.11, 192.168.0.12]": f"[{lab.ip('n2')}, {lab.ip('n3')}]",
        "ssh_user: ubuntu": "ssh_user: root",
        "~/.ssh/id_ed25519": "~/.ssh/id_nc",
    }.items():
        assert text.count(was) == 1, was
        text = text.replace(was, now)
    lab.put("laptop", "~/checkout/cluster/on-premise.yaml", text)


def test_up_submit_down_leaves_nothing_running(lab: Lab) -> None:
    in_checkout = "cd ~/checkout && "
    lab.run("laptop", in_checkout + "ray get-auth-token --generate", timeout_s=90)
    lab.run("laptop", in_checkout + "ray up -y cluster/on-premise.yaml", timeout_s=300)
    joined = "python -m horovod_tune.node.wait_for_nodes --address auto --nodes 3 --timeout-s 300"
    missing = lab.run("n1", f"{joined} || tail -n 50 /tmp/ray/session_latest/logs/monitor*", timeout_s=360)
    assert "3 nodes after" in missing.stdout, missing.stdout
    for host in lab.hosts:
        mode = lab.run(host, "stat -c %a ~/.ray/auth_token", timeout_s=60).stdout.strip()
        assert mode == "600", f"{host} has its token at mode {mode}"

    search = "--address auto --num-hosts 3 --num-slots 1 --num-samples 2 --epochs 2"
    submit = f"ray submit cluster/on-premise.yaml examples/bayesopt_digits.py -- {search}"
    output = lab.run("laptop", in_checkout + submit, timeout_s=400).stdout
    assert "best_config: {'lr':" in output, output[-4000:]
    assert "held-out digits" in output
    # No shared file system: the checkpoints came back to the head, whose driver wrote them.
    saved = lab.run("n1", "ls -d ~/ray_results/*/*/checkpoint_*/*.pt", timeout_s=60).stdout
    assert len(saved.splitlines()) == 4, saved

    lab.run("laptop", in_checkout + "ray down -y cluster/on-premise.yaml", timeout_s=180)
    for host in lab.hosts:
        wait_until(
            lambda host=host: not lab.processes(host, RAY_PROCESSES),
            timeout_s=120,
            what=f"{host} without Ray",
        )
