"""`cluster/cluster.yaml` on AWS: moto simulates EC2, and the lab's hosts are its instances."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from lab import PAGE, Lab, page_steps, wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(1500),
    pytest.mark.usefixtures("jobs_possible"),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("moto", "boto3", "flask"))),
        reason="needs moto, flask, flask-cors and boto3: pip install moto flask flask-cors boto3",
    ),
]

LAPTOP = "10.77.0.1"
SETTINGS = f"""
export AWS_ENDPOINT_URL=http://{LAPTOP}:5000 AWS_ACCESS_KEY_ID=key AWS_SECRET_ACCESS_KEY=secret
export AWS_DEFAULT_REGION=us-west-2 AWS_EC2_METADATA_DISABLED=true
"""
# What an AWS account has before: a network, here with the lab's addresses, and a security group.
ACCOUNT = """
import boto3, json, os
ec2 = boto3.client("ec2")
vpc = ec2.create_vpc(CidrBlock="10.77.0.0/16")["Vpc"]["VpcId"]
zone = ec2.describe_availability_zones()["AvailabilityZones"][0]["ZoneName"]
subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.77.0.0/24", AvailabilityZone=zone)["Subnet"]["SubnetId"]
group = ec2.create_security_group(GroupName="ours", Description="ours", VpcId=vpc)["GroupId"]
image = ec2.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
key = os.path.expanduser("~/.ssh/authorized_keys")
ec2.import_key_pair(KeyName="mine", PublicKeyMaterial=open(key, "rb").read())
# Ray has been here before: it takes half a minute over making these.
iam = boto3.client("iam")
who = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
iam.create_role(RoleName="ray-autoscaler-v1", AssumeRolePolicyDocument=json.dumps({"Statement": [who]}))
iam.create_instance_profile(InstanceProfileName="ray-autoscaler-v1")
iam.add_role_to_instance_profile(InstanceProfileName="ray-autoscaler-v1", RoleName="ray-autoscaler-v1")
print(json.dumps({"subnet": subnet, "group": group, "image": image}))
"""
INSTANCES = """
import boto3, json
ec2 = boto3.client("ec2")
found = []
for page in ec2.describe_instances()["Reservations"]:
    for each in page["Instances"]:
        wanted = {"InstanceId": each["InstanceId"], "Attribute": "instanceInitiatedShutdownBehavior"}
        at_shutdown = ec2.describe_instance_attribute(**wanted)["InstanceInitiatedShutdownBehavior"]["Value"]
        found.append([each["PrivateIpAddress"], each["State"]["Name"], at_shutdown])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    # moto gives out a subnet's addresses from .4 on.
    with Lab(3, jobs=True, NC_FIRST="4") as lab:
        # An instance's own, which shuts it down.
        lab.put("n1", "/usr/local/bin/sudo", '#!/bin/sh\necho "$@" >> /shared/sudo\n', "755")
        for host in ["laptop", *lab.hosts]:
            lab.run(host, f"echo '{SETTINGS}' >> ~/.bashrc", timeout_s=60)
        log = tmp_path_factory.mktemp("aws") / "moto.log"
        with lab.running("laptop", f"exec moto_server -H {LAPTOP} -p 5000", log):
            lab.wait_for_port("laptop", f"{LAPTOP}:5000")
            lab.prepare_laptop("cluster.yaml", edits(in_python(lab, ACCOUNT)))
            yield lab


def in_python(lab: Lab, program: str) -> Any:
    output = lab.run("laptop", ["bash", "-lc", 'python -c "$0"', program], timeout_s=180).stdout
    return json.loads(output.strip().splitlines()[-1])


def edits(account: dict[str, str]) -> dict[str, str]:
    """What the file's first lines ask for; then what is this test bed's and not an account's."""
    return {
        "&image ami-00000000000000000": f"&image {account['image']}",
        "[sg-00000000000000000]": f"[{account['group']}]",
        # No workers at the start: the search asks for them. Without it they leave after some seconds.
        "&least 3": "&least 0",
        "idle_timeout_minutes: 5": "idle_timeout_minutes: 0.2",
        "node_setup.sh nccl": "node_setup.sh cpu",
        # The hosts' addresses are private ones, their user is root, and they know the lab's key.
        "type: aws": "type: aws\n  use_internal_ips: true",
        "ssh_user: ubuntu": "ssh_user: root\n  ssh_private_key: ~/.ssh/id_nc",
        "ImageId: *image": f"ImageId: *image\n      SubnetIds: [{account['subnet']}]\n      KeyName: mine",
    }


def states(lab: Lab) -> dict[str, str]:
    found = in_python(lab, INSTANCES)
    assert {at_shutdown for _, _, at_shutdown in found} == {"terminate"}
    return {address: state for address, state, _ in found}


def test_a_search_gets_the_instances_that_its_trials_need_and_gives_them_back(
    lab: Lab, tmp_path: Path
) -> None:
    steps = {title: text.replace("on-premise.yaml", "cluster.yaml") for title, text in page_steps().items()}
    start, forward = steps["Start"].rsplit("ray dashboard", 1)
    with lab.running("laptop", f"cd ~/checkout; {start}", tmp_path / "up") as up:
        assert up.wait(timeout=480) == 0, (tmp_path / "up").read_text()[-6000:]
    settings, submit, *_ = steps["Submit and watch"].splitlines()
    # The page's command for a head that ends by itself, which has a file to wait for here.
    (ends_head,) = re.findall(r"`(bash -c .*?)`", PAGE.read_text())
    submit = submit.replace("--no-wait ", "").replace("python tune.py --address auto", ends_head)
    submit = submit.replace("tune.py --address auto", "search.py --address auto --until /shared/enough")
    log = tmp_path / "job"
    with ExitStack() as running:
        forwarding = f"cd ~/checkout; exec ray dashboard{forward}"
        running.enter_context(lab.running("laptop", forwarding, tmp_path / "forward"))
        lab.wait_for_port("laptop", "127.0.0.1:8265")
        job = running.enter_context(lab.running("laptop", f"cd ~/project; {settings}; exec {submit}", log))

        def searched() -> bool:
            assert job.poll() is None, log.read_text()[-6000:]
            return "tick 1\n" in log.read_text()

        wait_until(searched, timeout_s=600, what="the search")
        # Three instances took part; two of them came because the trials waited for them, and are idle now.
        found = [(host, "data arrived") for host in lab.hosts]
        assert f"best {{'x': 1.0}} found {found} errors 0" in log.read_text(), log.read_text()[-4000:]
        head = {lab.ip("n1"): "running"}
        given_back = {lab.ip(host): "terminated" for host in ("n2", "n3")}
        wait_until(lambda: states(lab) == head | given_back, timeout_s=180, what="idle instances to go")
        lab.run("n1", "touch /shared/enough", timeout_s=30)
        assert job.wait(timeout=120), "the script's exit status, which is 3"
    assert "shutdown -h +30" in lab.run("n1", "cat /shared/sudo", timeout_s=30).stdout
    fetch, down = steps["Results, then the end"].strip().splitlines()
    lab.run("laptop", f"cd ~/checkout; {fetch}; {down}", timeout_s=240)
    fetched = lab.run("laptop", "ls ~/checkout/ray_results/project/*/result.json", timeout_s=30).stdout
    assert len(fetched.split()) == 3, fetched
    assert states(lab) == {lab.ip(host): "terminated" for host in lab.hosts}
