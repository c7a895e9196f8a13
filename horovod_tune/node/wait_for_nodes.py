"""Runs before the driver of a cluster that is starting: waits until its nodes have joined.

`python -m horovod_tune.node.wait_for_nodes --nodes 4 --timeout-s 120`, with `RAY_ADDRESS` set.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import time

from horovod_tune.errors import HorovodTuneError

POLL_S = 0.5


class NodesMissing(HorovodTuneError, TimeoutError):
    """Not all nodes joined in time."""


def wait_for_port(address: str, deadline: float) -> None:
    """Wait until something listens on `HOST:PORT`; `deadline` is on the monotonic clock, in seconds.

    Raises:
        NodesMissing: nothing does by then.
    """
    host, _, port = address.rpartition(":")
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=2).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise NodesMissing(f"Ray's head does not listen on {address}: {error}") from error
            time.sleep(POLL_S)


def wait_for_nodes(address: str, num_nodes: int, *, timeout_s: float) -> list[str]:
    """Wait until `num_nodes` nodes of the cluster at `address` are alive; return their host names, sorted.

    `address` is HOST:PORT, or ``auto`` on a machine of the cluster. Connects to Ray and disconnects again.

    Raises:
        NodesMissing: fewer have joined after `timeout_s` seconds; names those that have.
    """
    import ray

    deadline = time.monotonic() + timeout_s
    if address != "auto":
        wait_for_port(address, deadline)
    ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    try:
        while True:
            hosts = sorted(node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"])
            if len(hosts) >= num_nodes:
                return hosts
            if time.monotonic() > deadline:
                raise NodesMissing(
                    f"{len(hosts)} of {num_nodes} nodes have joined {address} in {timeout_s:g} s: "
                    f"{' '.join(hosts)}. Look at Ray's log of the others"
                )
            time.sleep(POLL_S)
    finally:
        ray.shutdown()


def main(arguments: list[str] | None = None) -> int:
    """Wait, and say on stderr which nodes are there or missing."""
    parser = argparse.ArgumentParser(prog="python -m horovod_tune.node.wait_for_nodes", description=__doc__)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--timeout-s", type=float, default=120.0)
    parser.add_argument("--address", default=os.environ.get("RAY_ADDRESS"))
    options = parser.parse_args(arguments)
    if not options.address:
        parser.error("--address or RAY_ADDRESS must say HOST:PORT, or auto")
    start = time.monotonic()
    try:
        hosts = wait_for_nodes(options.address, options.nodes, timeout_s=options.timeout_s)
    except (NodesMissing, ConnectionError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(hosts)} nodes after {time.monotonic() - start:.0f} s: {' '.join(hosts)}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
