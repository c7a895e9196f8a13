"""`cluster/cluster.yaml` on AWS: moto plays EC2, and the lab's hosts are its instances."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import REPOSITORY, Lab, wait_until

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
pages = boto3.client("ec2").describe_instances()["Reservations"]
print(json.dumps([[i["PrivateIpAddress"], i["State"]["Name"]] for page in pages for i in page["Instances"]]))
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    # moto gives out a subnet's addresses from .4 on.
    with Lab(3, jobs=True, NC_FIRST="4") as lab:
        lab.give_job_packages("n1")
        for host in ["laptop", *lab.hosts]:
            lab.run(host, f"echo '{SETTINGS}' >> ~/.bashrc", timeout_s=60)
        log = tmp_path_factory.mktemp("aws") / "moto.log"
        server = lab.start(
            "laptop",
            ["bash", "-lc", f"exec moto_server -H {LAPTOP} -p 5000"],
            log,
        )
        try:
            wait_until(
                lambda: (
                    not lab.run("laptop", f"</dev/tcp/{LAPTOP}/5000", timeout_s=30, check=False).returncode
                ),
                timeout_s=180,
                what="moto",
            )
            lab.check_out("laptop")
            yield lab
        finally:
            server.kill()
            server.wait(timeout=20)


def in_python(lab: Lab, program: str) -> Any:
    output = lab.run("laptop", ["bash", "-lc", 'python -c "$0"', program], timeout_s=180).stdout
    return json.loads(output.strip().splitlines()[-1])


def edited(account: dict[str, str]) -> str:
    """Do what the file's first lines ask for; then what is this test bed's and not an account's."""
    text = (REPOSITORY / "cluster" / "cluster.yaml").read_text()
    for was, now in {
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
    }.items():
        assert was in text, was
        text = text.replace(was, now)
    return text


def states(lab: Lab) -> dict[str, str]:
    return dict(map(tuple, in_python(lab, INSTANCES)))


def test_a_search_gets_the_instances_that_its_trials_need_and_gives_them_back(
    lab: Lab, tmp_path: Path
) -> None:
    account = in_python(lab, ACCOUNT)
    lab.put("laptop", "~/checkout/cluster/cluster.yaml", edited(account))
    job = f"python {REPOSITORY}/tests/cluster/jobs/rank_search.py --hosts 3 --until /shared/enough"
    launch = f"cd ~/checkout && horovod-tune launch aws --file cluster/cluster.yaml -- {job}"
    log = tmp_path / "launch.log"
    launched = lab.start("laptop", ["bash", "-lc", launch], log)
    try:

        def searched() -> bool:
            assert launched.poll() is None, log.read_text()[-6000:]
            return "best_config" in log.read_text()

        wait_until(searched, timeout_s=600, what="the search")
        # Three instances took part; two of them came because the trials waited for them, and are idle now.
        assert "best_config {'x': 1.0} hosts n1 n2 n3 errors 0" in log.read_text(), log.read_text()[-4000:]
        head = {lab.ip("n1"): "running"}
        given_back = {lab.ip(host): "terminated" for host in ("n2", "n3")}
        wait_until(lambda: states(lab) == head | given_back, timeout_s=180, what="idle instances to go")
        lab.run("n1", "touch /shared/enough", timeout_s=30)
        assert launched.wait(timeout=180) == 0, log.read_text()[-6000:]
    finally:
        launched.kill()
        launched.wait(timeout=20)
    # The launch brought the results back and took the rest down.
    fetched = lab.run("laptop", "ls ~/checkout/ray_results/*/*/result.json", timeout_s=30).stdout
    assert len(fetched.splitlines()) == 3, fetched
    assert states(lab) == {lab.ip(host): "terminated" for host in lab.hosts}
    assert lab.run("laptop", "stat -c %a ~/.ray/auth_token", timeout_s=30).stdout.strip() == "600"
