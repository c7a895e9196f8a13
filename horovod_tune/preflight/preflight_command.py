"""`horovod-tune doctor --address`: the doctor of one machine, asked about a whole cluster."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

# How long a cluster may take to be connected to.
CONNECT_TIMEOUT_S = 30.0
# Run in a child process, because ray.init() retries for two minutes and cannot be interrupted.
_CONNECT = """
import logging, sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.CRITICAL)
ray.shutdown()
"""


def add_parsers(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Give the doctor's parser the option `--address`. The doctor itself knows nothing of clusters."""
    doctor = subparsers.choices["doctor"]
    doctor.add_argument(
        "--address", metavar="ADDRESS", help="look at every machine of the Ray cluster there, e.g. auto"
    )
    of_this_machine = doctor.get_default("run")

    def run(arguments: argparse.Namespace) -> int:
        if arguments.address is None:
            return int(of_this_machine(arguments))
        return look_at_cluster(arguments.address, as_json=arguments.json)

    doctor.set_defaults(run=run)


def why_unreachable(address: str, *, timeout_s: float = CONNECT_TIMEOUT_S) -> str | None:
    """Return why no Ray cluster answers at `address` within ``timeout_s`` seconds; None where one does."""
    command = [sys.executable, "-c", _CONNECT, address]
    try:
        ran = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return (
            f"no Ray cluster answered at {address} within {timeout_s:g} s. Does one run there (ray status), "
            "is this its head's address and port, and does a firewall let this machine through?"
        )
    if ran.returncode == 0:
        return None
    said = [line.strip() for line in ran.stderr.splitlines() if line.strip()]
    return (
        f"could not connect to a Ray cluster at {address}: {(said or [f'exit status {ran.returncode}'])[-1]}"
    )


def look_at_cluster(address: str, *, as_json: bool = False) -> int:
    """Print the preflight of the cluster at `address`; return 1 if a trial across it could not run."""
    import logging

    why = why_unreachable(address)
    if why is not None:
        print(f"horovod-tune doctor: {why}", file=sys.stderr)
        return 1
    import ray

    from horovod_tune.preflight.check import check

    ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    try:
        report = check([], num_hosts=2)
    finally:
        ray.shutdown()
    if as_json:
        said = {
            "can_run_trials": report.ok,
            "problems": [asdict(problem) for problem in report.problems],
            "machines": [asdict(look) for look in report.looks],
        }
        print(json.dumps(said, indent=2))
        return 0 if report.ok else 1
    if not report.looks:
        print(
            f"The cluster at {address} has one machine: horovod-tune doctor, without --address, looks at it."
        )
        return 0
    print(report)
    count = len(report.looks)
    print(f"\nA trial across these {count} machines {'can' if report.ok else 'cannot'} run.")
    return 0 if report.ok else 1
