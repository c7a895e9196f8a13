"""The rendezvous of a world: the key-value server that Horovod's Gloo ranks find each other through.

Runs as one thread in the coordinator. It speaks the little HTTP that Horovod 0.28's `http_store.cc` sends:
one request a connection, PUT and GET of ``/scope/key``, DELETE when a rank has connected. It differs from
Horovod's own server in three ways: a GET for a key that is not there yet is held until it comes (the stock
client otherwise asks again every 10 ms), the listen backlog takes a whole world at once (the stock 5 drops
connections, which are retried after seconds), and every path starts with a secret that only this trial's
ranks were given. Bodies are opaque bytes; nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

BACKLOG = 4096
HOLD_S = 5.0
"""How long a GET is held; the client asks again after a 404, so this only bounds what a held socket costs."""
STRANGER_S = 5.0
"""How long a connection may take to send its request."""
MAX_REQUEST_BYTES = 4 << 20
MAX_LINE_BYTES = 4096
"""The first line of a request has the secret in it; who sends more without one is dropped."""
MAX_CONNECTIONS = 8192


@dataclass
class _Scope:
    """One Gloo context's keys; `left` counts the ranks that have connected, `size` how many will."""

    values: dict[str, bytes] = field(default_factory=dict)
    left: int = 0
    size: int = 0


@dataclass
class _Connection:
    socket: socket.socket
    expires: float
    data: bytearray = field(default_factory=bytearray)
    is_known: bool = False
    is_watched: bool = False


class Rendezvous:
    """A running rendezvous; `close()` ends it, and so does the end of its process.

    Args:
        host: the address to listen on: the loopback where all ranks share a host, else the address that the
            other hosts reach this one by.
    """

    def __init__(self, host: str) -> None:
        self._secret = secrets.token_urlsafe(24)
        self._scopes: dict[str, _Scope] = {}
        self._held: dict[tuple[str, str], list[_Connection]] = {}
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server((host, 0), backlog=BACKLOG)
        self._listener.setblocking(False)
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        address, port = self._listener.getsockname()[:2]
        self.address = f"{address}:{port}/{self._secret}"
        """What HOROVOD_GLOO_RENDEZVOUS_ADDR has to be: address, port, and the secret that heads each path."""
        self._connections: dict[socket.socket, _Connection] = {}
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="horovod-tune-rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and drop every connection; twice is harmless."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(OSError):  # the thread has ended, and closed this, when it met an error
            self._wake_write.send(b".")
        self._thread.join(timeout=5.0)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(timeout=1.0 if self._connections else None):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is not self._wake_read:
                        # It may have been answered and dropped a moment ago, within this same round.
                        connection = self._connections.get(key.fileobj)  # type: ignore[call-overload]
                        if connection is not None:
                            self._read(connection)
                self._expire(time.monotonic())
        finally:
            for connection in list(self._connections.values()):
                self._drop(connection)
            for each in (self._listener, self._wake_read, self._wake_write, self._selector):
                each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError):
                return
            if len(self._connections) >= MAX_CONNECTIONS:
                client.close()
                continue
            client.setblocking(False)
            connection = _Connection(client, time.monotonic() + STRANGER_S)
            self._connections[client] = connection
            self._read(connection)  # the request mostly arrives with the connection: saves a round
            if client in self._connections:
                self._selector.register(client, selectors.EVENT_READ)
                connection.is_watched = True

    def _read(self, connection: _Connection) -> None:
        try:
            received = connection.socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        connection.data += received
        if not received or len(connection.data) > MAX_REQUEST_BYTES:
            self._drop(connection)
            return
        if not connection.is_known:
            line, newline, _ = bytes(connection.data[:MAX_LINE_BYTES]).partition(b"\r\n")
            if not newline and len(line) < MAX_LINE_BYTES:
                return
            if not self._knows_secret(line):
                self._drop(connection)
                return
            connection.is_known = True
        head, separator, body = bytes(connection.data).partition(b"\r\n\r\n")
        if separator and len(body) >= _content_length(head):
            self._answer(connection, head, body)

    def _knows_secret(self, line: bytes) -> bool:
        path = line.partition(b" ")[2].partition(b" ")[0]
        # Horovod appends ":port" to the address that it is given, so that ends up behind the secret.
        given = path.lstrip(b"/").partition(b"/")[0].partition(b":")[0]
        return hmac.compare_digest(given, self._secret.encode())

    def _answer(self, connection: _Connection, head: bytes, body: bytes) -> None:
        method, _, rest = head.partition(b" ")
        name = rest.partition(b" ")[0].lstrip(b"/").partition(b"/")[2]
        scope_name, _, key = name.decode("ascii", "replace").rpartition("/")
        scope = self._scopes.setdefault(scope_name, _Scope())
        if method == b"PUT":
            scope.values[key] = body
            self._reply(connection, b"")
            for waiting in self._held.pop((scope_name, key), ()):
                self._reply(waiting, body)
        elif method == b"GET":
            if key in scope.values:
                self._reply(connection, scope.values[key])
            else:
                connection.expires = time.monotonic() + HOLD_S
                self._held.setdefault((scope_name, key), []).append(connection)
        elif method == b"DELETE":
            self._leave(scope)
            self._reply(connection, b"")
        else:
            self._drop(connection)

    @staticmethod
    def _leave(scope: _Scope) -> None:
        # A rank deletes after a barrier of its Gloo context: nobody asks for these keys any more, and the
        # next hvd.init() may already put new ones while slower ranks still say goodbye to the old.
        if scope.left == 0:
            scope.size = sum(1 for key in scope.values if key.isdigit())
            scope.values = {}
        scope.left += 1
        if scope.left >= scope.size:
            scope.left = 0

    def _expire(self, now: float) -> None:
        for connection in [each for each in self._connections.values() if each.expires <= now]:
            self._reply(connection, b"", status=b"404 Not Found")
        for key, waiting in list(self._held.items()):
            alive = [each for each in waiting if each.socket in self._connections]
            if alive:
                self._held[key] = alive
            else:
                del self._held[key]

    def _reply(self, connection: _Connection, body: bytes, status: bytes = b"200 OK") -> None:
        if connection.socket not in self._connections:
            return
        # Bodies are small against a socket's buffer; a peer that does not read loses its answer and retries.
        with contextlib.suppress(OSError):
            connection.socket.send(
                b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
                % (status, len(body), body)
            )
        self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        if self._connections.pop(connection.socket, None) is not None:
            if connection.is_watched:
                self._selector.unregister(connection.socket)
            connection.socket.close()


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value) if value.strip().isdigit() else MAX_REQUEST_BYTES
    return 0
