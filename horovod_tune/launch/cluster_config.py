"""From what `horovod-tune launch` was told to the cluster file for `ray up`. Pure."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_tune.launch.machines import GCP_CPU_IMAGE, MachineType, machine_for
from horovod_tune.launch.values import LaunchError

# The cluster files behind each target that `ray up` brings up.
TEMPLATES = {
    "local": "on-premise.yaml",
    "aws": "cluster.yaml",
    "gcp": "gcp.yaml",
    "gcp-tpu": "gcp-tpu.yaml",
}
# A rented machine whose set-up has not ended by then shuts itself down.
SET_UP_LIMIT_MIN = 120


@dataclass(frozen=True)
class RayUpOptions:
    """What differs from the file in `cluster/`; None leaves what stands there."""

    # Machines in all, the head among them.
    nodes: int | None = None
    gpus_per_node: int | None = None
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
    gpus = {"local": _local, "aws": _aws, "gcp": _gcp, "gcp-tpu": _tpu}[target](config, options)
    config["file_mounts"] = {
        remote: str(source / local) if local.startswith("./") else local
        for remote, local in config["file_mounts"].items()
    }
    if target != "gcp-tpu":
        config["setup_commands"] = [f"bash ~/.horovod-tune/node_setup.sh {'nccl' if gpus else 'cpu'}"]
    return config


def launched_config(
    config: dict[str, Any], *, name: str, autostop_min: float, keep_up: bool
) -> dict[str, Any]:
    """Return a cluster file as one launch brings it up: with its own name, and an end.

    The head watches over the cluster (`node.autostop`). A rented machine is gone when it shuts down, and
    shuts down when its set-up gets stuck.

    Raises:
        LaunchError: the file is of a kind that a launch cannot look after.
    """
    config = copy.deepcopy(config)
    config.pop("metadata", None)
    if config.get("docker"):
        raise LaunchError("--file: a cluster file with docker: is not supported; leave docker: out")
    config["cluster_name"] = name
    cloud = {"local": "local", "aws": "aws", "gcp": "gcp"}.get(config["provider"]["type"])
    if cloud is None:
        raise LaunchError(
            f"--file: provider type must be local, aws or gcp, got {config['provider']['type']!r}"
        )
    watch = f"python -m horovod_tune.node.autostop --detach --cloud {cloud} --grace-min {autostop_min:g}"
    config["head_start_ray_commands"] = [
        *config["head_start_ray_commands"],
        watch + (" --keep-up" if keep_up else ""),
    ]
    if cloud != "local":
        stuck = f"sudo -n shutdown -h +{SET_UP_LIMIT_MIN} 2>/dev/null || true"
        config["setup_commands"] = [stuck, *config.get("setup_commands", [])]
    if cloud == "aws":
        for kind in config["available_node_types"].values():
            kind["node_config"]["InstanceInitiatedShutdownBehavior"] = "terminate"
    return config


def machines_in_words(config: dict[str, Any]) -> str:
    """Return what a cluster is made of, for whoever pays for it.

    >>> machines_in_words({"provider": {"type": "local", "head_ip": "a", "worker_ips": ["b"]}})
    '2 machines of yours (a b)'
    """
    provider = config["provider"]
    if "head_ip" in provider:
        hosts = [provider["head_ip"], *provider.get("worker_ips", [])]
        return f"{len(hosts)} machines of yours ({' '.join(hosts)})"
    parts: list[str] = []
    for name, kind in config["available_node_types"].items():
        node = kind["node_config"]
        machine = node.get("InstanceType") or node.get("machineType") or node.get("acceleratorType", "?")
        machine = str(machine).rpartition("/")[2]
        if name == config["head_node_type"]:
            parts.insert(0, f"1 x {machine}")
        elif kind.get("max_workers"):
            least, most = kind.get("min_workers", 0), kind["max_workers"]
            parts.append(f"{most if least == most else f'{least} to {most}'} x {machine}")
    return " and ".join(parts)


def _local(config: dict[str, Any], options: RayUpOptions) -> int:
    if not options.hosts:
        raise LaunchError(
            "--hosts must name the head and the workers, e.g. --hosts 192.168.0.10,192.168.0.11"
        )
    if options.nodes not in (None, len(options.hosts)):
        raise LaunchError(f"--nodes must be {len(options.hosts)} as --hosts names, got {options.nodes}")
    config["provider"]["head_ip"], *workers = options.hosts
    config["provider"]["worker_ips"] = workers
    return options.gpus_per_node or 0


def _count_workers(config: dict[str, Any], options: RayUpOptions) -> None:
    """Let workers come when trials wait for them, and leave when idle: none is paid for before or after."""
    worker = config["available_node_types"]["worker"]
    most = worker["max_workers"] if options.nodes is None else options.nodes - 1
    worker.update(min_workers=0, max_workers=most)
    config["max_workers"] = most


def _require(given: dict[str, str | None]) -> None:
    missing = [option for option, value in given.items() if not value]
    if missing:
        raise LaunchError(f"{', '.join(missing)} must be given (or --file, a file that you edited)")


def _aws(config: dict[str, Any], options: RayUpOptions) -> int:
    _require(
        {
            "--region": options.region,
            "--image": options.image,
            "--security-group or --ssh-from": options.security_group,
        }
    )
    _count_workers(config, options)
    machine = machine_for("aws", name=options.machine, gpus=options.gpus_per_node)
    for kind in config["available_node_types"].values():
        node = kind["node_config"]
        node["ImageId"] = options.image
        node["SecurityGroupIds"] = [options.security_group]
        node["InstanceType"] = machine.name
    if options.spot:
        worker = config["available_node_types"]["worker"]["node_config"]
        worker["InstanceMarketOptions"] = {"MarketType": "spot"}
    return machine.gpus


def _needs_project(options: RayUpOptions) -> None:
    _require({"--project": options.project, "--region": options.region, "--zone": options.zone})


def _gcp(config: dict[str, Any], options: RayUpOptions) -> int:
    _needs_project(options)
    _count_workers(config, options)
    machine = machine_for("gcp", name=options.machine, gpus=options.gpus_per_node)
    for name, kind in config["available_node_types"].items():
        # head and worker share one node_config in the file
        kind["node_config"] = copy.deepcopy(kind["node_config"])
        _gcp_node(kind, machine, options.image)
        if options.spot and name == "worker":
            kind["node_config"]["scheduling"] = {"preemptible": True, "onHostMaintenance": "TERMINATE"}
    return machine.gpus


def _gcp_node(kind: dict[str, Any], machine: MachineType, image: str | None) -> None:
    node, resources = kind["node_config"], kind["resources"]
    node["machineType"] = machine.name
    cpus = (
        machine.cpus or int(machine.name.rpartition("-")[2]) if machine.name[-1].isdigit() else machine.cpus
    )
    if not cpus:
        raise LaunchError(f"--machine-type {machine.name} is not in the table: give a --file with its CPUs")
    resources["CPU"] = cpus
    source = node["disks"][0]["initializeParams"]
    if machine.gpus:
        resources["GPU"] = machine.gpus
        node["guestAccelerators"] = [
            {"acceleratorType": machine.gpu or "nvidia-l4", "acceleratorCount": machine.gpus}
        ]
    else:
        resources.pop("GPU", None)
        node.pop("guestAccelerators", None)
        node.pop("scheduling", None)
        node.pop("metadata", None)  # installs the driver
        source["sourceImage"] = GCP_CPU_IMAGE
    if image:
        source["sourceImage"] = image


def _tpu(config: dict[str, Any], options: RayUpOptions) -> int:
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
    return 0
