"""The sockets of this process that Gloo opened, so that a world that waits for a lost peer can be cut short.

A rank of a broken world may wait in a receive that Gloo ends only at its time-out (seen with 3 ranks: rank 1
waited for rank 2, which had left because rank 0 was killed), and always does where the peer's host is silent.
`hvd.shutdown()` waits for that receive. Shutting the sockets down ends it at once, as if the peers had gone.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator


def open_tcp_sockets(*, but_port: int | None = None) -> dict[int, str]:
    """Return this process's TCP sockets that may carry data: file descriptor to the kernel's name for it.

    Not those that have ``but_port`` at one of their ends.
    """
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{entry}")
            if name.startswith("socket:") and _is_tcp(int(entry), but_port):
                found[int(entry)] = name
    return found


def but(sockets: dict[int, str], others: dict[int, str]) -> dict[int, str]:
    """Return those of ``sockets``, as `open_tcp_sockets` returns them, that are not among ``others``."""
    return {descriptor: name for descriptor, name in sockets.items() if others.get(descriptor) != name}


def _is_tcp(descriptor: int, but_port: int | None) -> bool:
    with _borrowed(descriptor) as each:
        if each.family not in (socket.AF_INET, socket.AF_INET6) or each.type != socket.SOCK_STREAM:
            return False
        if but_port is not None and but_port in (each.getsockname()[1], each.getpeername()[1]):
            return False
        # Gloo ends the process if its listening socket is shut down.
        return not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    # A copy of the descriptor: closing it leaves the owner's open.
    with socket.socket(fileno=os.dup(descriptor)) as each:
        yield each


def shut_down(sockets: dict[int, str]) -> None:
    """End both directions of those sockets that are still the ones that `open_tcp_sockets` found."""
    for descriptor, name in sockets.items():
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if os.readlink(f"/proc/self/fd/{descriptor}") == name:
                with _borrowed(descriptor) as each:
                    each.shutdown(socket.SHUT_RDWR)
