"""What `horovod-tune launch` does for each target: its file and commands from the options, shown or run."""

from __future__ import annotations

import argparse
import shlex

import yaml

from horovod_tune.launch import cluster_files, plans, steps
from horovod_tune.launch.values import LaunchError, checked, checked_count, checked_hosts, checked_network


def run_slurm(arguments: argparse.Namespace) -> int:
    """Submit the script as a Slurm job, and follow it unless asked not to; return the exit status."""
    if arguments.time is not None:
        checked("--time", "Slurm time", arguments.time)
    for option in ("partition", "account"):
        if getattr(arguments, option) is not None:
            checked(f"--{option}", "Slurm word", getattr(arguments, option))
    if arguments.cpus_per_task is not None:
        checked_count("--cpus-per-task", arguments.cpus_per_task, least=1, most=1024)
    script = arguments.file or str(cluster_files.cluster_file("slurm.sbatch"))
    words = plans.sbatch_command(
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
    return steps.launch_with_slurm(words, follow=not arguments.no_follow)


def run_ray_up(arguments: argparse.Namespace) -> int:
    """Bring a cluster up with `ray up`, run the script on it, take it down; return the exit status."""
    if arguments.file is not None:
        path = arguments.file
        with open(path) as file:
            text = file.read()
    else:
        template = cluster_files.load(plans.TEMPLATES[arguments.target])
        options = _ray_up_options(arguments)
        config = plans.ray_up_config(arguments.target, template, options, cluster_files.package_source())
        path = f"{config['cluster_name']}.{arguments.target}.yaml"
        text = f"# Written by: horovod-tune launch {arguments.target}\n" + yaml.safe_dump(
            config, sort_keys=False
        )
    rest = {
        "nodes": steps.nodes_at_the_start(yaml.safe_load(text)),
        "results": arguments.results,
        "keep_up": arguments.keep_up,
    }
    planned = steps.ray_up_steps(path, arguments.command, **rest)
    if arguments.dry_run:
        print(text)
        for words in planned:
            print("$ " + shlex.join(words))
        return 0
    if arguments.file is None:
        steps.write_file(path, text)
    return steps.launch_with_ray_up(path, arguments.command, **rest)


def _ray_up_options(arguments: argparse.Namespace) -> plans.RayUpOptions:
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
            checked("--" + name.replace("_", "-"), kinds[name], value)
    machine = given.pop("instance_type") or given.pop("machine_type", None)
    given.pop("machine_type", None)
    group = given.pop("security_group")
    if getattr(arguments, "ssh_from", None):
        network = checked_network("--ssh-from", arguments.ssh_from)
        if arguments.region is None:
            raise LaunchError("--region must be given with --ssh-from")
        if arguments.dry_run:
            group = "sg-00000000"  # made by the launch itself
        else:
            from horovod_tune.launch.aws import security_group

            group = security_group(arguments.region, network)
    hosts = getattr(arguments, "hosts", None)
    return plans.RayUpOptions(
        **given,
        name=arguments.name,
        nodes=getattr(arguments, "nodes", None),
        gpus_per_node=getattr(arguments, "gpus_per_node", 0),
        spot=getattr(arguments, "spot", False),
        hosts=tuple(checked_hosts("--hosts", hosts)) if hosts else (),
        ssh_key=arguments.ssh_key,
        machine=machine,
        security_group=group,
        ship=tuple(arguments.ship),
    )


def run_kuberay(arguments: argparse.Namespace) -> int:
    """Submit the script as a RayJob, and follow it; return the exit status."""
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
            cluster_files.load("kuberay.yaml"),
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
        for words in steps.kuberay_steps(path, name):
            print("$ " + shlex.join(words))
        return 0
    if arguments.file is None:
        steps.write_file(path, text)
    return steps.launch_with_kubectl(path, name)
