"""The one thing on AWS that `ray up` does not do well by itself: a security group that is closed."""

from __future__ import annotations

from typing import Any

from horovod_tune.launch.values import LaunchError


def security_group(region: str, ssh_from: str, *, client: Any = None) -> str:
    """Return the id of a group that lets in its members, and port 22 from `ssh_from`; in the default VPC.

    It is made when there is none yet for this network, and left in place for the next launch.
    Ray's own group has port 22 open to the world, whatever rules a cluster file adds.

    Args:
        region: such as ``us-west-2``.
        ssh_from: an IPv4 network, such as ``203.0.113.7/32``.
        client: boto3's EC2 client; made when not given.

    Raises:
        LaunchError: boto3 is missing, or the region has no default VPC.
    """
    if client is None:
        try:
            import boto3
        except ModuleNotFoundError:
            raise LaunchError("AWS needs boto3. Type: pip install boto3") from None
        client = boto3.client("ec2", region_name=region)
    networks = client.describe_vpcs(Filters=[{"Name": "is-default", "Values": ["true"]}])["Vpcs"]
    if not networks:
        raise LaunchError(
            f"{region} has no default VPC: make a group yourself and name it with --security-group"
        )
    vpc = networks[0]["VpcId"]
    name = f"horovod-tune {ssh_from}"
    filters = [{"Name": "group-name", "Values": [name]}, {"Name": "vpc-id", "Values": [vpc]}]
    found = client.describe_security_groups(Filters=filters)["SecurityGroups"]
    if found:
        return str(found[0]["GroupId"])
    group = client.create_security_group(
        GroupName=name, Description="Ray nodes among themselves, ssh from one network", VpcId=vpc
    )["GroupId"]
    client.authorize_security_group_ingress(
        GroupId=group,
        IpPermissions=[
            {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group}]},
            {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": ssh_from}]},
        ],
    )
    return str(group)
