"""`horovod-tune launch`: its options. What each target does with them stands in the files `*_target`."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import _SubParsersAction

DESCRIPTION = """\
Brings a cluster up, submits the script as a job there and follows it, brings the results back and takes
the cluster down. The job does not need this machine: Ctrl-C, a closed terminal or a lost network leave it
running, and attach, logs, status, fetch, stop, down and list work from any later terminal. --dry-run shows
the file and the commands and starts nothing.
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
    _add_running(targets)
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
    parser.add_argument(
        "--dry-run", action="store_true", help="show the file and the commands, start nothing"
    )
    parser.add_argument("--name", help="of the launch (your name, the script's and a short id)")
    if name != "running":
        parser.add_argument("--file", help="a file of yours in place of the one that ships with horovod-tune")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- python SCRIPT.py …")
    parser.set_defaults(run=run, target=name, launch_options=parser)
    return parser


def _add_job(parser: argparse.ArgumentParser) -> None:
    """What becomes of a job of Ray's, wherever its cluster comes from."""
    parser.add_argument(
        "--storage", metavar="URI", help="s3:// or gs:// folder that Tune writes the results to"
    )
    parser.add_argument(
        "--fetch", action="append", default=[], metavar="PATH", help="of the head, beside Tune's experiments"
    )
    parser.add_argument("--ssh-key", help="path of the private key")


def _add_running(targets: Any) -> None:
    parser = _add_target(targets, "running", "a Ray cluster that is up already")
    parser.add_argument("--head", metavar="USER@HOST", help="the cluster's head, which ssh reaches")
    parser.add_argument("--nodes", type=int, help="wait until it has so many machines")
    _add_working_dir(parser)
    _add_job(parser)


def _add_working_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ship", action="append", default=[], metavar="PATH", help="goes along beside the script's folder"
    )
    parser.add_argument(
        "--exclude", action="append", default=[], metavar="PATTERN", help="of the script's folder, stays here"
    )
    parser.add_argument("--results", default="./ray_results", help="where the results go (./ray_results)")


def _add_slurm(targets: Any) -> None:
    parser = _add_target(targets, "slurm", "a Slurm cluster, from its login node")
    parser.add_argument("--nodes", type=int, default=1, help="machines (1)")
    parser.add_argument("--gpus-per-node", type=int, default=0)
    parser.add_argument("--cpus-per-task", type=int, help="CPUs on each machine (2)")
    parser.add_argument("--time", help="limit; two minutes before it the job stops cleanly and is requeued")
    parser.add_argument("--mem", help="memory on each machine, as Slurm writes it: 64G")
    for option in ("partition", "account", "constraint", "qos"):
        parser.add_argument(f"--{option}", help="as sbatch's")
    parser.add_argument("--exclusive", action="store_true", help="whole machines")
    parser.add_argument(
        "--array", help="several searches as one job array: 0-3; each sees SLURM_ARRAY_TASK_ID"
    )
    parser.add_argument("--requeues", type=int, help="how many times the job may be requeued (20)")
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="any other option: --sbatch=--mail-type=END",
    )
    parser.add_argument("--no-follow", action="store_true", help="submit and return")


def _add_ray_up(targets: Any, name: str, text: str) -> None:
    parser = _add_target(targets, name, text)
    if name != "gcp-tpu":
        parser.add_argument("--nodes", type=int, help="machines at most, the head among them")
        parser.add_argument("--gpus-per-node", type=int, help="the machine type follows; 0: CPUs only (0)")
    _add_working_dir(parser)
    _add_job(parser)
    parser.add_argument("--keep-up", action="store_true", help="leave the cluster up at the end")
    parser.add_argument(
        "--autostop",
        type=float,
        metavar="MINUTES",
        help="after the job, and so long without a fetch, the cluster ends (720; 30 with --storage; 0: no)",
    )
    parser.add_argument("--ssh-user")
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
    _add_working_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run `horovod-tune launch TARGET`; return its exit status."""
    from horovod_tune.launch import kuberay_target, ray_up_target, running_target, slurm_target
    from horovod_tune.launch.console import StepFailed
    from horovod_tune.launch.values import LaunchError, checked, checked_count

    arguments.command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    try:
        if arguments.name is not None:
            checked("--name", "name", arguments.name)
        if getattr(arguments, "nodes", None) is not None:
            checked_count("--nodes", arguments.nodes, least=1, most=MOST_NODES)
        if getattr(arguments, "gpus_per_node", None) is not None:
            checked_count("--gpus-per-node", arguments.gpus_per_node, least=0, most=MOST_GPUS)
        if arguments.target == "running":
            return running_target.run_running(arguments)
        if arguments.target == "slurm":
            return slurm_target.run_slurm(arguments)
        if arguments.target == "kuberay":
            return kuberay_target.run_kuberay(arguments)
        return ray_up_target.run_ray_up(arguments)
    except StepFailed as failed:
        print(f"horovod-tune launch: {failed}", file=sys.stderr)
        return 1
    except (LaunchError, FileNotFoundError) as error:
        print(f"horovod-tune launch: {error}", file=sys.stderr)
        return 2
