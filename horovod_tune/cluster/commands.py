"""`horovod-tune launch`: its options, and what each target does with them."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import _SubParsersAction

DESCRIPTION = """\
Writes the file for a cluster, brings the cluster up, runs the script there, follows its output, brings the
results back and takes the cluster down. --dry-run shows the file and the commands and starts nothing.
"""
MOST_NODES = 4096
MOST_GPUS = 64


def add_parsers(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `horovod-tune`, and the option `--address` to its doctor."""
    from horovod_tune.cluster.preflight.command import extend_doctor

    if "doctor" in subparsers.choices:
        extend_doctor(subparsers.choices["doctor"])
    launch = subparsers.add_parser(
        "launch",
        help="run a script on a cluster: your machines, Slurm, a cloud, Kubernetes",
        description=DESCRIPTION,
    )
    targets = launch.add_subparsers(title="targets", metavar="TARGET", required=True)
    _add_slurm(targets)
    for target, text in {
        "local": "your own machines, by ssh",
        "aws": "Amazon EC2",
        "gcp": "Google Compute Engine",
        "gcp-tpu": "a TPU slice on Google Cloud",
    }.items():
        _add_ray_up(targets, target, text)
    _add_kuberay(targets)


def _add_target(targets: Any, name: str, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = targets.add_parser(
        name, help=text, description=f"Runs a script on {text}."
    )
    parser.set_defaults(run=run, target=name)
    parser.add_argument(
        "--dry-run", action="store_true", help="show the file and the commands, start nothing"
    )
    parser.add_argument("--name", help="of the cluster or job (horovod-tune)")
    parser.add_argument("--file", help="a file of yours in place of the one that ships with horovod-tune")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- python SCRIPT.py …")
    return parser


def _add_slurm(targets: Any) -> None:
    parser = _add_target(targets, "slurm", "a Slurm cluster, from its login node")
    parser.add_argument("--nodes", type=int, default=1, help="machines (1)")
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument("--cpus-per-task", type=int, help="CPUs on each machine (2)")
    parser.add_argument("--time", help="limit; two minutes before it the job stops cleanly and is requeued")
    parser.add_argument("--partition")
    parser.add_argument("--account")
    parser.add_argument("--no-follow", action="store_true", help="submit and return")


def _add_ray_up(targets: Any, name: str, text: str) -> None:
    parser = _add_target(targets, name, text)
    if name != "gcp-tpu":
        parser.add_argument("--nodes", type=int, help="machines, the head among them")
        parser.add_argument(
            "--gpus-per-node", type=int, default=0, help="0 compiles Horovod without NCCL (0)"
        )
    parser.add_argument("--results", default="./ray_results", help="where the results go (./ray_results)")
    parser.add_argument("--keep-up", action="store_true", help="leave the cluster up at the end")
    parser.add_argument(
        "--ship", action="append", default=[], metavar="PATH", help="a file or folder for every node"
    )
    parser.add_argument("--ssh-user")
    parser.add_argument("--ssh-key", help="path of the private key")
    if name == "local":
        parser.add_argument("--hosts", help="addresses, comma-separated, the head first")
        return
    parser.add_argument("--region")
    parser.add_argument("--spot", action="store_true", help="pre-emptible workers")
    if name == "aws":
        parser.add_argument("--instance-type")
        parser.add_argument("--image", help="AMI")
        group = parser.add_mutually_exclusive_group()
        group.add_argument("--security-group", help="that lets its members in on all ports and you on 22")
        group.add_argument(
            "--ssh-from", metavar="NETWORK", help="make such a group, with port 22 for this network"
        )
        return
    parser.add_argument("--project")
    parser.add_argument("--zone")
    if name == "gcp":
        parser.add_argument("--machine-type")
        parser.add_argument("--image", help="source image")
    else:
        parser.add_argument("--accelerator-type", help="such as v5litepod-16")
        parser.add_argument("--runtime-version", help="such as v2-alpha-tpuv5-lite")


def _add_kuberay(targets: Any) -> None:
    parser = _add_target(targets, "kuberay", "Kubernetes with the KubeRay operator")
    parser.add_argument("--nodes", type=int, default=3, help="worker pods at most (3)")
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument("--image", help="container image with horovod-tune and Horovod: cluster/Dockerfile")


def run(arguments: argparse.Namespace) -> int:
    """Run `horovod-tune launch TARGET`; return its exit status."""
    import subprocess

    from horovod_tune.cluster.values import LaunchError, checked, checked_count

    arguments.command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    try:
        if arguments.name is not None:
            checked("--name", "name", arguments.name)
        if getattr(arguments, "nodes", None) is not None:
            checked_count("--nodes", arguments.nodes, least=1, most=MOST_NODES)
        if hasattr(arguments, "gpus_per_node"):
            checked_count("--gpus-per-node", arguments.gpus_per_node, least=0, most=MOST_GPUS)
        if arguments.target == "slurm":
            return _run_slurm(arguments)
        if arguments.target == "kuberay":
            return _run_kuberay(arguments)
        return _run_ray_up(arguments)
    except (LaunchError, FileNotFoundError) as error:
        print(f"horovod-tune launch: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as failure:
        print(
            f"horovod-tune launch: {shlex.join(failure.cmd)} ended with {failure.returncode}", file=sys.stderr
        )
        return 1


def _run_slurm(arguments: argparse.Namespace) -> int:
    from horovod_tune.cluster import launch
    from horovod_tune.cluster.plans import sbatch_command
    from horovod_tune.cluster.source import cluster_file
    from horovod_tune.cluster.values import checked, checked_count

    if arguments.time is not None:
        checked("--time", "Slurm time", arguments.time)
    for option in ("partition", "account"):
        if getattr(arguments, option) is not None:
            checked(f"--{option}", "Slurm word", getattr(arguments, option))
    if arguments.cpus_per_task is not None:
        checked_count("--cpus-per-task", arguments.cpus_per_task, least=1, most=1024)
    script = arguments.file or str(cluster_file("slurm.sbatch"))
    words = sbatch_command(
        script,
        arguments.command,
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        cpus_per_task=arguments.cpus_per_task,
        name=arguments.name,
        time_limit=arguments.time,
        partition=arguments.partition,
        account=arguments.account,
    )
    if arguments.dry_run:
        with open(script) as file:
            print(file.read())
        print("$ " + shlex.join(words))
        return 0
    return launch.launch_with_slurm(words, follow=not arguments.no_follow)


def _run_ray_up(arguments: argparse.Namespace) -> int:
    import yaml

    from horovod_tune.cluster import launch, plans, source

    if arguments.file is not None:
        path = arguments.file
        with open(path) as file:
            text = file.read()
    else:
        template = source.load(plans.TEMPLATES[arguments.target])
        options = _ray_up_options(arguments)
        config = plans.ray_up_config(arguments.target, template, options, source.package_source())
        path = f"{config['cluster_name']}.{arguments.target}.yaml"
        text = f"# Written by: horovod-tune launch {arguments.target}\n" + yaml.safe_dump(
            config, sort_keys=False
        )
    rest = {
        "nodes": launch.nodes_at_the_start(yaml.safe_load(text)),
        "results": arguments.results,
        "keep_up": arguments.keep_up,
    }
    steps = launch.ray_up_steps(path, arguments.command, **rest)
    if arguments.dry_run:
        print(text)
        for words in steps:
            print("$ " + shlex.join(words))
        return 0
    if arguments.file is None:
        launch.write_file(path, text)
    return launch.launch_with_ray_up(path, arguments.command, **rest)


def _ray_up_options(arguments: argparse.Namespace) -> Any:
    from horovod_tune.cluster import values
    from horovod_tune.cluster.plans import RayUpOptions

    kinds = {
        "ssh_user": "user",
        "region": "region",
        "zone": "zone",
        "project": "project",
        "instance_type": "instance type",
        "machine_type": "machine type",
        "security_group": "security group",
        "accelerator_type": "accelerator type",
        "runtime_version": "runtime version",
    }
    if arguments.target == "aws":
        kinds["image"] = "AMI"
    elif arguments.target == "gcp":
        kinds["image"] = "container image"  # a path of the same letters
    given = {name: getattr(arguments, name, None) for name in kinds}
    for name, value in given.items():
        if value is not None:
            values.checked("--" + name.replace("_", "-"), kinds[name], value)
    machine = given.pop("instance_type") or given.pop("machine_type", None)
    given.pop("machine_type", None)
    group = given.pop("security_group")
    if getattr(arguments, "ssh_from", None):
        network = values.checked_network("--ssh-from", arguments.ssh_from)
        if arguments.region is None:
            raise values.LaunchError("--region must be given with --ssh-from")
        if arguments.dry_run:
            group = "sg-00000000"  # made by the launch itself
        else:
            from horovod_tune.cluster.aws import security_group

            group = security_group(arguments.region, network)
    hosts = getattr(arguments, "hosts", None)
    return RayUpOptions(
        **given,
        name=arguments.name,
        nodes=getattr(arguments, "nodes", None),
        gpus_per_node=getattr(arguments, "gpus_per_node", 0),
        spot=getattr(arguments, "spot", False),
        hosts=tuple(values.checked_hosts("--hosts", hosts)) if hosts else (),
        ssh_key=arguments.ssh_key,
        machine=machine,
        security_group=group,
        ship=tuple(arguments.ship),
    )


def _run_kuberay(arguments: argparse.Namespace) -> int:
    import yaml

    from horovod_tune.cluster import launch, plans, source
    from horovod_tune.cluster.values import LaunchError, checked

    name = arguments.name or "horovod-tune"
    if arguments.file is not None:
        path = arguments.file
        with open(path) as file:
            text = file.read()
    else:
        if arguments.image is None:
            raise LaunchError(
                "--image must name a container image with horovod-tune: cluster/Dockerfile makes one"
            )
        manifests = plans.rayjob(
            source.load("kuberay.yaml"),
            arguments.command,
            image=checked("--image", "container image", arguments.image),
            nodes=arguments.nodes,
            gpus_per_node=arguments.gpus_per_node,
            name=name,
        )
        path = f"{name}.kuberay.yaml"
        text = yaml.safe_dump_all(manifests, sort_keys=False)
    if arguments.dry_run:
        print(text)
        for words in launch.kuberay_steps(path, name):
            print("$ " + shlex.join(words))
        return 0
    if arguments.file is None:
        launch.write_file(path, text)
    return launch.launch_with_kubectl(path, name)
