"""Runs when all machines of a job are about to go: lets Ray drain them, so that trials save what they have.

`python -m horovod_tune.node.drain_all --in-s 90`, with `RAY_ADDRESS` set. Elastic trials that only commit
make checkpoints of their commits from then on, one at each report.
"""

from __future__ import annotations

import argparse
import os
import sys

from horovod_tune import ray_adapter


def main(arguments: list[str] | None = None) -> int:
    """Drain every node that is alive."""
    parser = argparse.ArgumentParser(prog="python -m horovod_tune.node.drain_all", description=__doc__)
    parser.add_argument("--in-s", type=float, required=True, help="in how many seconds the machines go")
    parser.add_argument("--address", default=os.environ.get("RAY_ADDRESS"), help="of the head: HOST:PORT")
    options = parser.parse_args(arguments)
    if not options.address:
        parser.error("give --address HOST:PORT, or set RAY_ADDRESS")
    try:
        nodes = ray_adapter.drain_as_preempted(options.address, None, in_s=options.in_s)
    except RuntimeError as error:
        print(f"drain_all: {error}", file=sys.stderr)
        return 1
    print(f"drain_all: Ray drains {len(nodes)} node(s), which go in {options.in_s:.0f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
