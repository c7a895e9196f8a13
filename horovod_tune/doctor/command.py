"""`horovod-tune doctor`, for this machine or for every node of a Ray cluster."""

from __future__ import annotations

import argparse
import logging
import socket
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

CONNECT_TIMEOUT_S = 10.0


def add_parsers(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to `horovod-tune`."""
    parser = subparsers.add_parser(
        "doctor",
        help="check that the installed versions are compatible",
        description="Checks that the versions installed here are compatible, and names the cure for each "
        "problem. Exits with status 1 if a trial could not run.",
    )
    address = "examine every machine of the Ray cluster at ADDRESS, e.g. auto"
    parser.add_argument("--address", metavar="ADDRESS", help=address)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit status."""
    if arguments.address is not None:
        return examine_cluster(arguments.address)
    from horovod_tune.doctor.findings import can_run_trials, diagnose
    from horovod_tune.doctor.node_info import collect_info
    from horovod_tune.doctor.report import machine_table

    info = collect_info()
    findings = diagnose(info)
    ok = can_run_trials(findings)
    print(f"{machine_table(info, findings)}\n\nA trial {'can' if ok else 'cannot'} run here.")
    return 0 if ok else 1


def examine_cluster(address: str) -> int:
    """Print the report of the cluster at `address`; return 1 if a trial across it could not run."""
    import ray

    from horovod_tune.doctor.nodes import check

    try:
        host, colon, port = address.removeprefix("ray://").rpartition(":")
        if colon:  # ray.init() would try for two minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()
        ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except Exception as error:  # Ray's are of many kinds
        cure = "Does one run there (ray status), and does a firewall let this machine through?"
        print(f"horovod-tune doctor: no Ray cluster at {address}: {error}. {cure}", file=sys.stderr)
        return 1
    try:
        report = check([])
    finally:
        ray.shutdown()
    if not report.nodes:
        print(f"The cluster at {address} has one machine; horovod-tune doctor without --address examines it.")
    else:
        can = "can" if report.ok else "cannot"
        print(f"{report}\n\nA trial across these {len(report.nodes)} machines {can} run.")
    return 0 if report.ok else 1
