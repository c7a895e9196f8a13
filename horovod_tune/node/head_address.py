"""Runs on the first node of a Slurm job: where the other nodes will find its Ray.

`python -m horovod_tune.node.head_address --peer NODE --first-port P` prints an address, a port for Ray and
a port for its client server.
"""

from __future__ import annotations

import argparse
import socket
import sys

PORTS_TRIED = 10


def address_towards(peer: str) -> str:
    """Return the address of the interface that this host reaches `peer` by.

    Asked of the routing table, not of the host's own name, which Debian and Ubuntu map to 127.0.1.1. Nothing
    is sent.

    >>> address_towards("127.0.0.1")
    '127.0.0.1'

    Raises:
        OSError: `peer` does not resolve or there is no route to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, 9))
        except socket.gaierror as error:
            raise OSError(
                f"{peer} has no IPv4 address, which Horovod's rendezvous and Gloo need: {error}"
            ) from error
        return str(probe.getsockname()[0])


def free_port(address: str, first: int) -> int:
    """Return the first port of `PORTS_TRIED` from `first` on that nobody on this host listens on.

    Raises:
        OSError: all of them are taken.
    """
    for port in range(first, first + PORTS_TRIED):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise OSError(f"ports {first} to {first + PORTS_TRIED - 1} of {address} are all taken")


def main(arguments: list[str] | None = None) -> int:
    """Print ADDRESS PORT CLIENT_PORT, or say on stderr why there is none."""
    parser = argparse.ArgumentParser(prog="python -m horovod_tune.node.head_address", description=__doc__)
    parser.add_argument("--peer", required=True, help="the node farthest in the job's list; may be this one")
    parser.add_argument("--first-port", type=int, required=True)
    options = parser.parse_args(arguments)
    try:
        if options.peer in (socket.gethostname(), socket.getfqdn(), "localhost"):
            address = "127.0.0.1"  # a job of one node needs no network
        else:
            address = address_towards(options.peer)
        port = free_port(address, options.first_port)
        print(address, port, free_port(address, port + 1))
    except OSError as error:
        print(f"no way from {socket.gethostname()} to {options.peer}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
