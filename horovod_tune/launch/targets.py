"""What `horovod-tune launch` does for each target: checks all, then shows or runs its file and commands."""

from __future__ import annotations

import argparse
import getpass
import importlib.util
import os
import shlex
import socket
import time
from pathlib import Path
from typing import Any

import yaml

from horovod_tune.launch import (
    cluster_config,
    cluster_files,
    fetching,
    kuberay_launch,
    ray_up_launch,
    slurm_launch,
    working_dir,
)
from horovod_tune.launch.launch_record import LaunchRecord, new_name, refuse_name_in_use
from horovod_tune.launch.script import Script, read_command
from horovod_tune.launch.values import (
    LaunchError,
    checked,
    checked_count,
    checked_hosts,
    checked_network,
)

AUTOSTOP_MIN = 720.0
# The results are in a bucket already: nothing but the bill is kept by keeping the cluster.
AUTOSTOP_WITH_STORAGE_MIN = 30.0


def _script(arguments: argparse.Namespace) -> Script:
    known = arguments.launch_options._option_string_actions
    return read_command(arguments.command, launch_options=known)


def _record(arguments: argparse.Namespace, script: Script, **more: Any) -> LaunchRecord:
    name = arguments.name or new_name(script.path.name)
    refuse_name_in_use(name)
    by = f"{getpass.getuser()}@{socket.gethostname()}"
    return LaunchRecord(name, arguments.target, list(arguments.command), time.time(), user=by, **more)


# --- Slurm -------------------------------------------------------------------------------------------------


def run_slurm(arguments: argparse.Namespace) -> int:
    """Submit the script as a Slurm job, and follow it unless asked not to; return the exit status."""
    if not arguments.command:
        raise LaunchError("after -- there must be the command to run, e.g. -- python tune.py; got nothing")
    words = _sbatch_words(arguments)
    script = Script(arguments.command[0], Path((*arguments.command, "")[1]), ())
    if Path(arguments.command[0]).name in ("python", "python3"):
        script = _script(arguments)
    if arguments.dry_run:
        print(Path(arguments.file or cluster_files.cluster_file("slurm.sbatch")).read_text())
        print("$ " + shlex.join(words))
        return 0
    record = _record(arguments, script, machines=f"{arguments.nodes} nodes of Slurm")
    record.save()
    try:
        slurm_launch.submit(record, words, log_pattern=_slurm_log(arguments))
    except LaunchError:
        record.note(phase="down")
        raise
    if arguments.array:
        print(f"One log a task: {_slurm_log(arguments)}. Their states: horovod-tune status {record.name}")
    if arguments.no_follow or arguments.array:
        return 0
    return slurm_launch.attach(record)


def _slurm_log(arguments: argparse.Namespace) -> str:
    return "horovod-tune-%A_%a.log" if arguments.array else "horovod-tune-%j.log"


def _sbatch_words(arguments: argparse.Namespace) -> list[str]:
    if arguments.time is not None:
        checked("--time", "Slurm time", arguments.time)
    for option in ("partition", "account", "qos", "mem"):
        if getattr(arguments, option) is not None:
            checked(f"--{option}", "Slurm word", getattr(arguments, option))
    if arguments.constraint is not None:
        checked("--constraint", "Slurm constraint", arguments.constraint)
    if arguments.array is not None:
        checked("--array", "Slurm array", arguments.array)
    if arguments.cpus_per_task is not None:
        checked_count("--cpus-per-task", arguments.cpus_per_task, least=1, most=1024)
    if arguments.requeues is not None:
        checked_count("--requeues", arguments.requeues, least=0, most=10000)
    for option in arguments.sbatch:
        checked("--sbatch", "sbatch option", option)
    requeues = None if arguments.requeues is None else f"ALL,HOROVOD_TUNE_REQUEUES={arguments.requeues}"
    options = {
        "--nodes": arguments.nodes,
        "--gpus-per-node": arguments.gpus_per_node or None,
        "--cpus-per-task": arguments.cpus_per_task,
        "--job-name": arguments.name,
        "--time": arguments.time,
        "--mem": arguments.mem,
        "--partition": arguments.partition,
        "--account": arguments.account,
        "--constraint": arguments.constraint,
        "--qos": arguments.qos,
        "--exclusive": arguments.exclusive,
        "--array": arguments.array,
        "--output": _slurm_log(arguments) if arguments.array else None,
        "--export": requeues,
    }
    script = arguments.file or str(cluster_files.cluster_file("slurm.sbatch"))
    return slurm_launch.sbatch_command(script, arguments.command, options, arguments.sbatch)


# --- ray up ------------------------------------------------------------------------------------------------


def run_ray_up(arguments: argparse.Namespace) -> int:
    """Launch on a cluster that `ray up` brings up; return the job's exit status."""
    script = _script(arguments)
    results = Path(arguments.results).expanduser()
    files = working_dir.files_to_ship(
        script.folder, arguments.ship, results=results, exclude=arguments.exclude
    )
    if arguments.storage is not None:
        checked("--storage", "bucket", arguments.storage)
    autostop_min = arguments.autostop
    if autostop_min is None:
        autostop_min = AUTOSTOP_WITH_STORAGE_MIN if arguments.storage else AUTOSTOP_MIN
    if autostop_min < 0:
        raise LaunchError(f"--autostop must be 0 or more minutes, got {autostop_min:g}")
    record = _record(
        arguments,
        script,
        results=str(results.resolve()),
        keep_up=arguments.keep_up,
        autostop_min=autostop_min,
    )
    if arguments.file is not None:
        config = yaml.safe_load(Path(arguments.file).read_text())
    else:
        template = cluster_files.load(cluster_config.TEMPLATES[arguments.target])
        options = _ray_up_options(arguments)
        config = cluster_config.ray_up_config(
            arguments.target, template, options, cluster_files.package_source()
        )
    config = cluster_config.launched_config(
        config, name=record.name, autostop_min=autostop_min, keep_up=arguments.keep_up
    )
    text = f"# Written by: horovod-tune launch {arguments.target}\n" + yaml.safe_dump(config, sort_keys=False)
    record.machines = cluster_config.machines_in_words(config)
    record.file = str(record.folder / "cluster.yaml")
    if arguments.dry_run:
        print(text)
        print(
            f"# {len(files)} files go along: {' '.join(sorted(files)[:20])}{' …' if len(files) > 20 else ''}"
        )
        print(f"$ ray up -y {record.file}")
        print(f"# then, on the head, as a job of Ray's: {shlex.join(script.command)}")
        print(f"$ ray down -y {record.file}")
        return 0
    fetching.check_writable(results)
    _check_access(config)
    record.save()
    write_private(Path(record.file), text)
    asked = {"storage": arguments.storage, "fetch": arguments.fetch}
    return ray_up_launch.launch(record, script, files, config, asked)


def _check_access(config: dict[str, Any]) -> None:
    """Find out what is missing on this machine before anything is rented.

    Raises:
        LaunchError: a key or credentials are missing.
    """
    key = config["auth"].get("ssh_private_key")
    if key and not Path(key).expanduser().is_file():
        raise LaunchError(f"--ssh-key must be a private key's file, got {key!r}: no such file")
    kind = config["provider"]["type"]
    if kind == "aws":
        if importlib.util.find_spec("boto3") is None:
            raise LaunchError("AWS needs boto3. Type: pip install boto3")
        import boto3

        if boto3.Session().get_credentials() is None:
            raise LaunchError("AWS has no credentials of yours here. Type: aws configure")
    if kind == "gcp":
        if importlib.util.find_spec("googleapiclient") is None:
            raise LaunchError(
                "Google Cloud needs its client library. Type: pip install google-api-python-client"
            )
        import google.auth
        from google.auth.exceptions import DefaultCredentialsError

        try:
            google.auth.default()
        except DefaultCredentialsError:
            raise LaunchError(
                "Google Cloud has no credentials of yours here. Type: gcloud auth application-default login"
            ) from None


def _ray_up_options(arguments: argparse.Namespace) -> cluster_config.RayUpOptions:
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
    return cluster_config.RayUpOptions(
        **given,
        nodes=getattr(arguments, "nodes", None),
        gpus_per_node=getattr(arguments, "gpus_per_node", None),
        spot=getattr(arguments, "spot", False),
        hosts=tuple(checked_hosts("--hosts", hosts)) if hosts else (),
        ssh_key=arguments.ssh_key,
        machine=machine,
        security_group=group,
    )


# --- Kubernetes --------------------------------------------------------------------------------------------


def run_kuberay(arguments: argparse.Namespace) -> int:
    """Submit the script as a RayJob, and follow it; return the exit status."""
    script = _script(arguments)
    results = Path(arguments.results).expanduser()
    files = working_dir.files_to_ship(
        script.folder, arguments.ship, results=results, exclude=arguments.exclude
    )
    record = _record(
        arguments, script, results=str(results.resolve()), machines=f"{arguments.nodes} pods at most"
    )
    if arguments.file is None and arguments.image is None:
        raise LaunchError(
            "--image must name a container image with horovod-tune: cluster/Dockerfile makes one"
        )
    template = cluster_files.load("kuberay.yaml")
    if arguments.file is not None:
        template = list(yaml.safe_load_all(Path(arguments.file).read_text()))
    image = arguments.image or _image_of(template)
    manifests = kuberay_launch.rayjob(
        template,
        script.command,
        kuberay_launch.work_zip(files),
        image=checked("--image", "container image", image),
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        name=record.name,
    )
    text = yaml.safe_dump_all(manifests, sort_keys=False)
    record.file = str(record.folder / "kuberay.yaml")
    if arguments.dry_run:
        print(text)
        print(f"$ kubectl create -f {record.file}")
        return 0
    record.save()
    write_private(Path(record.file), text)
    try:
        return kuberay_launch.launch(record)
    except LaunchError:
        if record.phase == "new":
            record.note(phase="down")
        raise


def _image_of(template: list[dict[str, Any]]) -> str:
    head = template[-1]["spec"]["rayClusterSpec"]["headGroupSpec"]
    return str(head["template"]["spec"]["containers"][0]["image"])


def write_private(path: Path, text: str) -> None:
    """Write a file for this user's eyes only, over a former one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
