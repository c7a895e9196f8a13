"""Runs when all machines of a job are about to go, and tells its trials, so that they save what they have.

`python -m horovod_tune.node.announce_end`, with `RAY_ADDRESS` set. Elastic trials that only commit make
checkpoints of their commits from then on, one at each report.
"""

from __future__ import annotations

import argparse
import os
import sys

from ray.exceptions import RaySystemError

from horovod_tune import ray_compat


def main(arguments: list[str] | None = None) -> int:
    """Tell every trial of the Ray at an address."""
    parser = argparse.ArgumentParser(prog="python -m horovod_tune.node.announce_end", description=__doc__)
    parser.add_argument("--address", default=os.environ.get("RAY_ADDRESS"), help="of the head: HOST:PORT")
    options = parser.parse_args(arguments)
    if not options.address:
        parser.error("give --address HOST:PORT, or set RAY_ADDRESS")
    try:
        ray_compat.announce_end(options.address)
    except (RuntimeError, RaySystemError) as error:
        print(f"announce_end: {error}", file=sys.stderr)
        return 1
    print("announce_end: the trials know that all machines are about to go")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
