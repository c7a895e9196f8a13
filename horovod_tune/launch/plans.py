"""From what `horovod-tune launch` was told to the file and the commands that do it. Pure."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_tune.launch.values import LaunchError

# The cluster files behind each target that `ray up` brings up.
TEMPLATES = {
    "local": "on-premise.yaml",
    "aws": "cluster.yaml",
    "gcp": "gcp.yaml",
    "gcp-tpu": "gcp-tpu.yaml",
}


@dataclass(frozen=True)
class RayUpOptions:
    """What differs from the file in `cluster/`; None and 0 leave what stands there."""

    name: str | None = None
    # Machines in all, the head among them.
    nodes: int | None = None
    gpus_per_node: int = 0
    spot: bool = False
    hosts: tuple[str, ...] = ()
    ssh_user: str | None = None
    ssh_key: str | None = None
    region: str | None = None
    zone: str | None = None
    project: str | None = None
    # The cloud's type of machine.
    machine: str | None = None
    image: str | None = None
    security_group: str | None = None
    accelerator_type: str | None = None
    runtime_version: str | None = None
    # Files and folders of this machine that go to the home of every node.
    ship: tuple[str, ...] = ()


def ray_up_config(
    target: str, template: dict[str, Any], options: RayUpOptions, source: Path
) -> dict[str, Any]:
    """Return the content of a cluster file for `ray up`.

    Args:
        target: a key of `TEMPLATES`.
        template: the content of that file.
        options: what to put into it.
        source: the folder with this package's source and `cluster/`, which the file names by ``./``.

    Raises:
        LaunchError: something has to be edited that no option gave.
    """
    config = copy.deepcopy(template)
    config.pop("metadata", None)  # held the places to edit
    if options.name:
        config["cluster_name"] = options.name
    provider, auth = config["provider"], config["auth"]
    for key, value in {
        "region": options.region,
        "availability_zone": options.zone,
        "project_id": options.project,
    }.items():
        if value:
            provider[key] = value
    if options.ssh_user:
        auth["ssh_user"] = options.ssh_user
    if options.ssh_key:
        auth["ssh_private_key"] = options.ssh_key
    {"local": _local, "aws": _aws, "gcp": _gcp, "gcp-tpu": _tpu}[target](config, options)
    config["file_mounts"] = {
        remote: str(source / local) if local.startswith("./") else local
        for remote, local in config["file_mounts"].items()
    }
    for path in options.ship:
        absolute = Path(path).expanduser().resolve()
        if not absolute.exists():
            raise LaunchError(f"--ship must name a file or folder, got {path!r}, which is not there")
        config["file_mounts"][f"~/{absolute.name}"] = str(absolute)
    if target in ("local", "aws", "gcp"):
        kind = "nccl" if options.gpus_per_node else "cpu"
        config["setup_commands"] = [f"bash ~/.horovod-tune/node_setup.sh {kind}"]
    return config


def _local(config: dict[str, Any], options: RayUpOptions) -> None:
    if not options.hosts:
        raise LaunchError(
            "--hosts must name the head and the workers, e.g. --hosts 192.168.0.10,192.168.0.11"
        )
    if options.nodes not in (None, len(options.hosts)):
        raise LaunchError(f"--nodes must be {len(options.hosts)} as --hosts names, got {options.nodes}")
    config["provider"]["head_ip"], *workers = options.hosts
    config["provider"]["worker_ips"] = workers


def _count_workers(config: dict[str, Any], options: RayUpOptions, *, maximum_too: bool = True) -> None:
    if options.nodes is None:
        return
    workers = options.nodes - 1
    config["available_node_types"]["worker"].update(min_workers=workers, max_workers=workers)
    config["max_workers"] = workers


def _aws(config: dict[str, Any], options: RayUpOptions) -> None:
    missing = [
        option
        for option, value in {
            "--region": options.region,
            "--image": options.image,
            "--security-group or --ssh-from": options.security_group,
        }.items()
        if not value
    ]
    if missing:
        raise LaunchError(f"{', '.join(missing)} must be given (or --file, a file that you edited)")
    _count_workers(config, options)
    for kind in config["available_node_types"].values():
        node = kind["node_config"]
        node["ImageId"] = options.image
        node["SecurityGroupIds"] = [options.security_group]
        if options.machine:
            node["InstanceType"] = options.machine
    if options.spot:
        worker = config["available_node_types"]["worker"]["node_config"]
        worker["InstanceMarketOptions"] = {"MarketType": "spot"}


def _needs_project(options: RayUpOptions) -> None:
    given = {"--project": options.project, "--region": options.region, "--zone": options.zone}
    missing = [option for option, value in given.items() if not value]
    if missing:
        raise LaunchError(f"{', '.join(missing)} must be given (or --file, a file that you edited)")


def _gcp(config: dict[str, Any], options: RayUpOptions) -> None:
    _needs_project(options)
    _count_workers(config, options)
    for name, kind in config["available_node_types"].items():
        # head and worker share one node_config in the file
        node = kind["node_config"] = copy.deepcopy(kind["node_config"])
        if options.machine:
            node["machineType"] = options.machine
        if not options.gpus_per_node:
            node.pop("guestAccelerators", None)
            kind["resources"].pop("GPU", None)
        else:
            node["guestAccelerators"][0]["acceleratorCount"] = options.gpus_per_node
            kind["resources"]["GPU"] = options.gpus_per_node
        if options.image:
            node["disks"][0]["initializeParams"]["sourceImage"] = options.image
        if options.spot and name == "worker":
            node["scheduling"] = {"preemptible": True, "onHostMaintenance": "TERMINATE"}


def _tpu(config: dict[str, Any], options: RayUpOptions) -> None:
    _needs_project(options)
    node = config["available_node_types"]["tpu"]["node_config"]
    if bool(options.accelerator_type) != bool(options.runtime_version):
        raise LaunchError(
            "--accelerator-type and --runtime-version must be given together: one fits the other"
        )
    if options.accelerator_type:
        node.update(acceleratorType=options.accelerator_type, runtimeVersion=options.runtime_version)
    if options.spot:
        node["schedulingConfig"] = {"preemptible": True}


def ray_submit_command(cluster_file: str, command: Sequence[str]) -> list[str]:
    """Return `ray submit` of `python SCRIPT ARGUMENTS…`.

    Ray joins the arguments with blanks into a line for the head's shell, so each is quoted here, once.

    >>> ray_submit_command("c.yaml", ["python", "tune.py", "--note", "two words; $HOME"])
    ['ray', 'submit', 'c.yaml', 'tune.py', '--', '--note', "'two words; $HOME'"]

    Raises:
        LaunchError: the command is something else than a Python script.
    """
    if len(command) < 2 or Path(command[0]).name not in ("python", "python3") or command[1].startswith("-"):
        raise LaunchError(f"after -- there must be `python SCRIPT.py …`, got {shlex.join(command)!r}")
    arguments = [shlex.quote(argument) for argument in command[2:]]
    return ["ray", "submit", cluster_file, command[1], *(["--", *arguments] if arguments else [])]


def sbatch_command(
    script: str,
    command: Sequence[str],
    *,
    nodes: int,
    gpus_per_node: int = 0,
    cpus_per_task: int | None = None,
    name: str | None = None,
    time_limit: str | None = None,
    partition: str | None = None,
    account: str | None = None,
) -> list[str]:
    """Return `sbatch` of `script` with `command` as its arguments, which no shell sees.

    >>> sbatch_command("slurm.sbatch", ["python", "tune.py"], nodes=4, gpus_per_node=2)
    ['sbatch', '--parsable', '--nodes=4', '--gpus-per-node=2', 'slurm.sbatch', 'python', 'tune.py']

    Raises:
        LaunchError: there is no command.
    """
    if not command:
        raise LaunchError("after -- there must be the command to run, e.g. -- python tune.py; got nothing")
    options = {
        "--nodes": nodes,
        "--gpus-per-node": gpus_per_node or None,
        "--cpus-per-task": cpus_per_task,
        "--job-name": name,
        "--time": time_limit,
        "--partition": partition,
        "--account": account,
    }
    words = [f"{option}={value}" for option, value in options.items() if value is not None]
    return ["sbatch", "--parsable", *words, script, *command]


def rayjob(
    template: Sequence[dict[str, Any]],
    command: Sequence[str],
    *,
    image: str,
    nodes: int,
    gpus_per_node: int = 0,
    name: str = "horovod-tune",
) -> list[dict[str, Any]]:
    """Return the manifests of `kuberay.yaml` with an image, an entrypoint and `nodes` workers at most.

    The entrypoint goes through a shell in the job's pod, so it is quoted.

    Raises:
        LaunchError: there is no command.
    """
    if not command:
        raise LaunchError("after -- there must be the command to run, e.g. -- python tune.py; got nothing")
    claim, job = copy.deepcopy(list(template))
    results = f"{name}-results"
    claim["metadata"]["name"], job["metadata"]["name"] = results, name
    job["spec"]["entrypoint"] = shlex.join(command)
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    workers.update(replicas=nodes, maxReplicas=nodes)
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        pod["containers"][0]["image"] = image
        for volume in pod["volumes"]:
            if "persistentVolumeClaim" in volume:
                volume["persistentVolumeClaim"]["claimName"] = results
    if gpus_per_node:
        for share in workers["template"]["spec"]["containers"][0]["resources"].values():
            share["nvidia.com/gpu"] = str(gpus_per_node)
    return [claim, job]
