"""Shuts down the sockets that Gloo opened in this process, to end its waits for a lost peer.

In a broken world, a rank may wait in a receive until Gloo's timeout. It always does if the peer's host does
not respond, but other cases exist: with 3 ranks, rank 1 waited for rank 2, which had left because rank 0 was
killed. `hvd.shutdown()` waits for the receive, which fails once this module has shut the socket down.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping


def open_tcp_sockets(
    *, except_port: int | None = None, before: Mapping[int, str] | None = None
) -> dict[int, str]:
    """Return this process's TCP sockets that may carry data: the kernel's name of each, by file descriptor.

    It omits sockets with ``except_port`` at either end, and those that an earlier call returned (``before``).
    """
    known = before or {}
    found = {}
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            name = os.readlink(f"/proc/self/fd/{entry}")
            if not name.startswith("socket:") or known.get(int(entry)) == name:
                continue
            if _is_tcp(int(entry), except_port):
                found[int(entry)] = name
    return found


def _is_tcp(descriptor: int, except_port: int | None) -> bool:
    with socket.socket(fileno=os.dup(descriptor)) as each:  # closes only the duplicate
        if each.family not in (socket.AF_INET, socket.AF_INET6) or each.type != socket.SOCK_STREAM:
            return False
        if except_port is not None and except_port in (each.getsockname()[1], each.getpeername()[1]):
            return False
        # Gloo ends the process if its listening socket is shut down.
        return not each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def shut_down(sockets: dict[int, str]) -> None:
    """Shut down the sockets that `open_tcp_sockets` found, except where the descriptor has been reused."""
    for descriptor, name in sockets.items():
        with contextlib.suppress(OSError):  # closed meanwhile, or not connected
            if os.readlink(f"/proc/self/fd/{descriptor}") == name:
                with socket.socket(fileno=os.dup(descriptor)) as each:
                    each.shutdown(socket.SHUT_RDWR)


class SocketRecorder:
    """The sockets of this process's world: `shut_down` ends the waits on them."""

    def __init__(self) -> None:
        self._recorded: dict[int, str] = {}
        # The sockets that were open before the current `forming` block; None if there is no block.
        self._before: dict[int, str] | None = None

    @contextlib.contextmanager
    def recording(self, *, except_port: int | None = None) -> Iterator[None]:
        """Record the sockets that are opened in this block, except those with ``except_port``."""
        before = open_tcp_sockets()
        try:
            yield
        finally:
            self._recorded |= open_tcp_sockets(except_port=except_port, before=before)

    @contextlib.contextmanager
    def forming(self) -> Iterator[None]:
        """Mark a block that forms a world: until it ends, `shut_down` includes every socket opened in it."""
        self._before = open_tcp_sockets()
        try:
            yield
        finally:
            self._before = None

    @property
    def is_forming(self) -> bool:
        return self._before is not None

    def shut_down(self) -> None:
        """End the waits on the world's sockets."""
        # In rare cases, one of these sockets is Ray's, which then reconnects.
        opened = {} if (before := self._before) is None else open_tcp_sockets(before=before)
        shut_down(self._recorded | opened)

    def forget(self) -> None:
        self._recorded = {}
