"""`horovod-tune launch`: its options. What each target does with them stands in `targets`."""

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
    """Add the command to `horovod-tune`."""
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

    from horovod_tune.launch import targets
    from horovod_tune.launch.values import LaunchError, checked, checked_count

    arguments.command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    try:
        if arguments.name is not None:
            checked("--name", "name", arguments.name)
        if getattr(arguments, "nodes", None) is not None:
            checked_count("--nodes", arguments.nodes, least=1, most=MOST_NODES)
        if hasattr(arguments, "gpus_per_node"):
            checked_count("--gpus-per-node", arguments.gpus_per_node, least=0, most=MOST_GPUS)
        if arguments.target == "slurm":
            return targets.run_slurm(arguments)
        if arguments.target == "kuberay":
            return targets.run_kuberay(arguments)
        return targets.run_ray_up(arguments)
    except (LaunchError, FileNotFoundError) as error:
        print(f"horovod-tune launch: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as failure:
        print(
            f"horovod-tune launch: {shlex.join(failure.cmd)} ended with {failure.returncode}", file=sys.stderr
        )
        return 1
