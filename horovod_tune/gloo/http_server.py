"""A server of the little HTTP that Horovod's ranks speak: one request a connection, a secret in its path.

One thread. Whoever connects and does not know the secret costs nothing but a file, for some seconds, and
ends nothing: not with bytes that are not a request, not with silence, not with more connections than the
process has files for.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

BACKLOG = 4096
# How long a connection may take to send its request.
STRANGER_S = 5.0
MAX_REQUEST_BYTES = 4 << 20
# The first line of a request has the secret in it; who sends more without one is dropped.
MAX_LINE_BYTES = 4096
MAX_CONNECTIONS = 8192
# Connections that have not shown the secret yet; with one more the oldest goes. Linux gives a process 1,024
# files by default, and a rank's request comes with its connection.
MAX_STRANGERS = 512
ACCEPTS_AT_ONCE = 256
# How long a peer may take to read some of its answer.
ANSWER_S = 30.0
# How much is read at a time: what a rank of a world of 1,700 puts.
READ_BYTES = 1 << 18
# How often connections are looked at that may have waited too long.
EXPIRY_S = 0.1
# How long nobody is accepted after the process had no file for another connection.
NO_FILES_S = 0.2
_NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@dataclass
class Connection:
    """One client. ``expires`` is when it is told that there is nothing for it, or dropped while it reads."""

    socket: socket.socket
    expires: float
    data: bytearray = field(default_factory=bytearray)
    unsent: list[memoryview] = field(default_factory=list)
    is_known: bool = False
    watched_for: int = 0


class SecretHttpServer:
    """Runs from when it is made to `close()`, or the end of its process.

    Args:
        host: the address to listen on.
        answer: called as ``answer(connection, method, path, body)`` for each request, in the server's thread.
            The path is without the secret. It calls `reply` or `drop`, now or later.
    """

    def __init__(self, host: str, answer: Callable[[Connection, bytes, str, bytes], None]) -> None:
        self._answer = answer
        self._secret = secrets.token_urlsafe(24)
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server((host, 0), backlog=BACKLOG)
        self._listener.setblocking(False)
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        address, port = self._listener.getsockname()[:2]
        # Address, port, and the secret that heads each path.
        self.address = f"{address}:{port}/{self._secret}"
        self._connections: dict[socket.socket, Connection] = {}
        # Those of the connections that have not shown the secret, the oldest first.
        self._strangers: dict[socket.socket, Connection] = {}
        # When the listener is listened to again; None where it is.
        self._accepts_at: float | None = None
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

    def _serve(self) -> None:
        looks_at = 0.0
        try:
            while not self._closing:
                for key, _ in self._selector.select(self._patience_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is not self._wake_read:
                        # It may have been answered and dropped a moment ago, within this same round.
                        connection = self._connections.get(key.fileobj)  # type: ignore[call-overload]
                        if connection is not None:
                            (self._send if connection.unsent else self._read)(connection)
                now = time.monotonic()
                if now >= looks_at:
                    looks_at = now + EXPIRY_S
                    self._expire(now)
                if self._accepts_at is not None and now >= self._accepts_at:
                    self._accepts_at = None
                    self._selector.register(self._listener, selectors.EVENT_READ)
        finally:
            for connection in list(self._connections.values()):
                self.drop(connection)
            for each in (self._listener, self._wake_read, self._wake_write, self._selector):
                each.close()

    def _patience_s(self) -> float | None:
        if self._accepts_at is not None:
            return max(0.0, self._accepts_at - time.monotonic())
        return 1.0 if self._connections else None

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                client, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._make_room()
                return  # nobody waits, or the connection is gone already
            if len(self._connections) >= MAX_CONNECTIONS or len(self._strangers) >= MAX_STRANGERS:
                self._drop_oldest_stranger()
            if len(self._connections) >= MAX_CONNECTIONS:
                client.close()
                continue
            client.setblocking(False)
            connection = Connection(client, time.monotonic() + STRANGER_S)
            self._connections[client] = self._strangers[client] = connection
            self._read(connection)  # the request mostly arrives with the connection: saves a round
            if client in self._connections and not connection.watched_for:
                self._watch(connection, selectors.EVENT_READ)

    def _make_room(self) -> None:
        if not self._drop_oldest_stranger():
            # Who waits in the backlog goes on waiting. The selector would call for it without a pause.
            self._selector.unregister(self._listener)
            self._accepts_at = time.monotonic() + NO_FILES_S

    def _drop_oldest_stranger(self) -> bool:
        oldest = next(iter(self._strangers.values()), None)
        if oldest is not None:
            self.drop(oldest)
        return oldest is not None

    def _watch(self, connection: Connection, events: int) -> None:
        if connection.watched_for:
            self._selector.modify(connection.socket, events)
        else:
            self._selector.register(connection.socket, events)
        connection.watched_for = events

    def _read(self, connection: Connection) -> None:
        try:
            received = connection.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        connection.data += received
        if not received or len(connection.data) > MAX_REQUEST_BYTES:
            self.drop(connection)
            return
        if not connection.is_known:
            line, newline, _ = bytes(connection.data[:MAX_LINE_BYTES]).partition(b"\r\n")
            if not newline and len(line) < MAX_LINE_BYTES:
                return
            if not self._knows_secret(line):
                self.drop(connection)
                return
            connection.is_known = True
            del self._strangers[connection.socket]
        end = connection.data.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(connection.data[:end])
        length = _content_length(head)
        if length is None or length > MAX_REQUEST_BYTES:
            self.drop(connection)
        elif len(connection.data) >= end + 4 + length:
            body = bytes(memoryview(connection.data)[end + 4 :])
            method, _, rest = head.partition(b" ")
            path = rest.partition(b" ")[0].lstrip(b"/").partition(b"/")[2]
            self._answer(connection, method, path.decode("ascii", "replace"), body)

    def _knows_secret(self, line: bytes) -> bool:
        path = line.partition(b" ")[2].partition(b" ")[0]
        # Horovod appends ":port" to the address that it is given, so that ends up behind the secret.
        given = path.lstrip(b"/").partition(b"/")[0].partition(b":")[0]
        return hmac.compare_digest(given, self._secret.encode())

    def _expire(self, now: float) -> None:
        for connection in [each for each in self._connections.values() if each.expires <= now]:
            if connection.unsent:
                self.drop(connection)
            else:
                self.reply(connection, b"", status=b"404 Not Found")

    def is_open(self, connection: Connection) -> bool:
        return connection.socket in self._connections

    def reply(self, connection: Connection, body: bytes, status: bytes = b"200 OK") -> None:
        """Answer, and let the connection go when all of it is sent; nothing where it is gone already."""
        if connection.socket not in self._connections or connection.unsent:
            return
        head = b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (status, len(body))
        connection.unsent = [memoryview(head), memoryview(body)]
        self._send(connection)

    def _send(self, connection: Connection) -> None:
        """Send what the socket takes of the answer; the rest when it takes more."""
        try:
            sent = connection.socket.sendmsg(connection.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # a peer that is gone asks again, with another connection
            self.drop(connection)
            return
        while connection.unsent and sent >= len(connection.unsent[0]):
            sent -= len(connection.unsent.pop(0))
        if not connection.unsent:
            self.drop(connection)
            return
        connection.unsent[0] = connection.unsent[0][sent:]
        connection.expires = time.monotonic() + ANSWER_S
        if connection.watched_for != selectors.EVENT_WRITE:
            self._watch(connection, selectors.EVENT_WRITE)

    def drop(self, connection: Connection) -> None:
        """Let a connection go without an answer; twice is harmless."""
        self._strangers.pop(connection.socket, None)
        if self._connections.pop(connection.socket, None) is not None:
            if connection.watched_for:
                self._selector.unregister(connection.socket)
            connection.socket.close()


def _content_length(head: bytes) -> int | None:
    """Return the value of the Content-Length header, None where it is missing or not a number."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            # Python refuses to read numbers of thousands of digits.
            return int(value) if value.strip().isdigit() and len(value.strip()) < 20 else None
    return 0
