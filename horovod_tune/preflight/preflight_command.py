"""`horovod-tune doctor --address`: the doctor of one machine, asked about a whole cluster."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction


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


def look_at_cluster(address: str, *, as_json: bool = False) -> int:
    """Print the preflight of the cluster at `address`; return 1 if a trial across it could not run."""
    import logging

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
