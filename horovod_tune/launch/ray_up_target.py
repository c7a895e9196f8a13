"""`horovod-tune launch local`, `aws`, `gcp`, `gcp-tpu`: checks all, then shows the file or brings it up."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
from pathlib import Path
from typing import Any

import yaml

from horovod_tune.launch import (
    cluster_config,
    cluster_files,
    fetching,
    prices,
    ray_up_launch,
    working_dir,
)
from horovod_tune.launch.new_launch import record_of, script_of, write_private
from horovod_tune.launch.values import (
    LaunchError,
    checked,
    checked_hosts,
    checked_network,
)

AUTOSTOP_MIN = 720.0
# The results are in a bucket already: nothing but the bill is kept by keeping the cluster.
AUTOSTOP_WITH_STORAGE_MIN = 30.0


def run_ray_up(arguments: argparse.Namespace) -> int:
    """Launch on a cluster that `ray up` brings up; return the job's exit status."""
    script = script_of(arguments)
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
    record = record_of(
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
    record.machines += prices.in_words(config)
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
