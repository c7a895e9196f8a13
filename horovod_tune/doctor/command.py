"""`horovod-tune doctor`, for this machine or for every node of a Ray cluster."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction


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


def unreachable_reason(address: str, *, timeout_s: float = 30.0) -> str | None:
    """Return why no Ray cluster responds at `address` within `timeout_s` seconds; None if one does."""
    from horovod_tune.horovod_build.installed import probe

    # In a child process, because ray.init() retries for two minutes and cannot be interrupted.
    connect = f"ray.init(address={address!r}, log_to_driver=False, logging_level=logging.CRITICAL)"
    answer = probe(f"import logging, ray\n{connect}\nray.shutdown()", timeout_s=timeout_s)
    if "slow_s" in answer:
        return (
            f"no Ray cluster responded at {address} within {timeout_s:g} s. Does one run there (ray status), "
            "is this its head's address and port, and does a firewall let this machine through?"
        )
    return f"could not connect to a Ray cluster at {address}: {answer['error']}" if answer else None


def examine_cluster(address: str) -> int:
    """Print the report of the cluster at `address`; return 1 if a trial across it could not run."""
    why = unreachable_reason(address)
    if why is not None:
        print(f"horovod-tune doctor: {why}", file=sys.stderr)
        return 1
    import ray

    from horovod_tune.doctor.nodes import check

    ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
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
