"""What the options of `horovod-tune launch` may be. Pure.

Each value goes into a file or onto a command line, so what it may be is said here by a pattern, not left to a
shell or a cloud to find out.
"""

from __future__ import annotations

import ipaddress
import re

from horovod_tune.errors import HorovodTuneError


class LaunchError(HorovodTuneError, ValueError):
    """An option of `horovod-tune launch` cannot be: says the name, what it may be and what it was."""


PATTERNS = {
    "name": (
        r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?",
        "lower-case letters, digits and -, at most 40, a letter first",
    ),
    "host": (r"[A-Za-z0-9]([A-Za-z0-9-]{0,62}\.?)*[A-Za-z0-9]?", "a host name or an IP address"),
    "user": (r"[a-z_][a-z0-9_-]{0,31}", "a Linux user name"),
    "region": (r"[a-z]{2,}(-[a-z]+)+-?\d", "a region such as us-west-2 or us-west1"),
    "zone": (r"[a-z]{2,}(-[a-z]+)+-?\d-?[a-z]", "a zone such as us-west1-a"),
    "instance type": (r"[a-z0-9-]+\.[a-z0-9-]+", "an instance type such as g5.2xlarge"),
    "machine type": (r"[a-z0-9]+(-[a-z0-9]+)+", "a machine type such as g2-standard-8"),
    "AMI": (r"ami-[0-9a-f]{8,17}", "an AMI's id, ami- and 8 to 17 hexadecimal digits"),
    "security group": (r"sg-[0-9a-f]{8,17}", "a group's id, sg- and 8 to 17 hexadecimal digits"),
    "project": (r"[a-z][a-z0-9-]{4,28}[a-z0-9]", "a Google Cloud project's id"),
    "accelerator type": (r"v\d[a-z]*(litepod)?-\d+", "a TPU slice such as v5litepod-16"),
    "runtime version": (r"[a-z0-9][a-z0-9.-]*", "a TPU software version such as v2-alpha-tpuv5-lite"),
    "container image": (r"[A-Za-z0-9][A-Za-z0-9._/:@-]*", "the name of a container image"),
    "Slurm word": (r"[A-Za-z0-9][A-Za-z0-9._,-]*", "letters, digits and . _ , -"),
    "Slurm constraint": (
        r"[A-Za-z0-9][A-Za-z0-9._,|&*\[\]()-]*",
        "features as Slurm writes them: a100&nvlink",
    ),
    "Slurm array": (
        r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?",
        "an array as Slurm writes it: 0-3, 1,5,7, 0-9%2",
    ),
    "sbatch option": (r"-(-[a-z][a-z-]*(=.+)?|[A-Za-z].*)", "an option of sbatch such as --mail-type=END"),
    "bucket": (r"(s3|gs)://[a-z0-9][a-z0-9._-]*(/.*)?", "a folder of a bucket such as s3://mine/results"),
    "Slurm time": (r"(\d+-)?\d+(:\d\d){0,2}", "a time limit as Slurm writes it: 90, 01:30:00, 2-00:00:00"),
}


def checked(option: str, kind: str, value: str) -> str:
    """Return `value` if it is of `kind`.

    >>> checked("--image", "AMI", "ami-0b294f219d14e6a82")
    'ami-0b294f219d14e6a82'

    Raises:
        LaunchError: it is not.
    """
    pattern, description = PATTERNS[kind]
    if not re.fullmatch(pattern, value):
        raise LaunchError(f"{option} must be {description}, got {value!r}")
    return value


def checked_count(option: str, value: int, *, least: int, most: int) -> int:
    """Return `value` if it is from `least` to `most`.

    Raises:
        LaunchError: it is not.
    """
    if not least <= value <= most:
        raise LaunchError(f"{option} must be from {least} to {most}, got {value}")
    return value


def checked_network(option: str, value: str) -> str:
    """Return `value` as an IPv4 network, if it is one and not the whole Internet.

    >>> checked_network("--ssh-from", "203.0.113.7")
    '203.0.113.7/32'

    Raises:
        LaunchError: it is not.
    """
    try:
        network = ipaddress.IPv4Network(value)
    except ValueError as error:
        raise LaunchError(
            f"{option} must be an IPv4 address or network such as 203.0.113.7/32, got {value!r}: {error}"
        ) from None
    if network.prefixlen < 8:
        raise LaunchError(f"{option} must not open port 22 to more than a /8, got {value!r}")
    return str(network)


def head_of_option(value: str, key: str | None) -> dict[str, str]:
    """Return how the head named by ``--head USER@HOST`` is reached: host, user, key.

    Raises:
        LaunchError: it is not of this form.
    """
    user, _, host = value.rpartition("@")
    if not user:
        raise LaunchError(f"--head must be USER@HOST, got {value!r}")
    return {
        "host": checked("--head", "host", host),
        "user": checked("--head", "user", user),
        "key": key or "",
    }


def checked_hosts(option: str, value: str) -> list[str]:
    """Return the machines of a comma-separated list, each once, the head first.

    Raises:
        LaunchError: there are fewer than two, one is named twice, or one is not a host.
    """
    hosts = [checked(option, "host", host.strip()) for host in value.split(",")]
    if len(hosts) < 2:
        raise LaunchError(f"{option} must name the head and at least one worker, got {value!r}")
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if twice:
        raise LaunchError(f"{option} must name each machine once, got {twice[0]} twice")
    return hosts
