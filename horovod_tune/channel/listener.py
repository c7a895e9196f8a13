"""Lets the ranks on the coordinator's own host connect to it, over sockets that never leave the machine.

The address is in Linux's abstract namespace, without a file, and exists only while the ranks of one world
connect. A rank must run as the same user and show the secret that came with its assignment.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass

CONNECT_S = 5.0
# How long what was sent may go without an acknowledgement before a connection of two hosts counts as lost.
LOST_S = 10.0
_CREDENTIALS = struct.Struct("3i")
_SECRET_BYTES = 32


@dataclass(frozen=True)
class ChannelToken:
    """The address that a rank connects to and the secret that it shows there; for one rank, used once.

    A pair of an IP address and a port is that of a coordinator on another host; ``by_rank`` tells that a rank
    listens there, which may still have to begin (`remote_listener`).
    """

    address: bytes | tuple[str, int]
    secret: bytes
    by_rank: bool = False


class Listener:
    """Accepts the ranks of one world while they connect, and no longer."""

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(b"\0horovod_tune_" + secrets.token_hex(16).encode())
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._secrets: dict[int, bytes] = {}

    def create_token(self, worker: int) -> ChannelToken:
        self._secrets[worker] = secrets.token_bytes(_SECRET_BYTES)
        return ChannelToken(self._listener.getsockname(), self._secrets[worker])

    def accept(self) -> dict[int, socket.socket]:
        """Return the ends of the workers that have connected, by index, and stop listening."""
        ends: dict[int, socket.socket] = {}
        with self._listener:
            while True:
                try:
                    end, _ = self._listener.accept()
                except BlockingIOError:
                    return ends
                worker = self._identify(end)
                if worker is None:
                    end.close()
                else:
                    ends[worker] = end

    def _identify(self, end: socket.socket) -> int | None:
        _, user, _ = _CREDENTIALS.unpack(
            end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if user != os.geteuid():
            return None
        try:
            shown = end.recv(_SECRET_BYTES, socket.MSG_DONTWAIT)
        except OSError:
            return None
        found = [each for each, secret in self._secrets.items() if hmac.compare_digest(secret, shown)]
        for worker in found:
            del self._secrets[worker]
        return found[0] if found else None


def connect(token: ChannelToken) -> socket.socket:
    """Connect a rank to the listener that gave ``token``, and show the secret.

    Raises:
        OSError: nobody listens there.
    """
    gives_up = time.monotonic() + CONNECT_S
    while True:
        try:
            return _connect(token)
        except ConnectionRefusedError:
            if not token.by_rank or time.monotonic() > gives_up:
                raise
        time.sleep(0.01)


def _connect(token: ChannelToken) -> socket.socket:
    is_remote = isinstance(token.address, tuple)
    end = socket.socket(socket.AF_INET if is_remote else socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.settimeout(CONNECT_S)
        end.connect(token.address)
        end.sendall(token.secret)
        end.settimeout(None)
    except OSError:
        end.close()
        raise
    prepare(end)
    return end


def prepare(end: socket.socket) -> None:
    """Let a connection of two hosts send at once and notice that it is lost."""
    if end.family == socket.AF_INET:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with contextlib.suppress(AttributeError, OSError):  # Linux has it
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(LOST_S * 1000))
