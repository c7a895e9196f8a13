"""Accepts the ranks on the coordinator's own host, over sockets that never leave the machine.

The address is in Linux's abstract namespace, without a file, and exists only while the ranks of one world
connect. A rank must run as the same user and show the secret that came with its assignment.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
from dataclasses import dataclass

CONNECT_S = 5.0
_CREDENTIALS = struct.Struct("3i")
_SECRET_BYTES = 32


@dataclass(frozen=True)
class ChannelToken:
    """The address that a rank connects to and the secret that it shows there; for one rank, used once."""

    address: bytes
    secret: bytes


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
    """Connect a rank to the listener that created ``token``, and show the secret.

    Raises:
        OSError: no process listens there.
    """
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        end.settimeout(CONNECT_S)
        end.connect(token.address)
        end.sendall(token.secret)
        end.settimeout(None)
    except OSError:
        end.close()
        raise
    return end
