"""The rendezvous of a world: the key-value server that Horovod's Gloo ranks find each other through.

Runs in the coordinator, in threads of Python's own HTTP server. It responds to the requests of Horovod
0.28's `http_store.cc`: one request per connection, PUT and GET of ``/scope/key``, DELETE when a rank has
connected. It differs from Horovod's own server in four ways: a GET for a missing key is held until the key
is there (the stock client otherwise repeats it every 10 ms), the listen backlog takes a whole world at once
(the stock 5 drops connections, which are retried after seconds), every path starts with a secret that only
this trial's ranks were given, and ``gathered.RANK.SIZE`` returns what the other ranks have put for RANK in
one answer, so that a world needs three requests per rank (Horovod as `horovod-tune install-horovod` builds
it; any other makes some for each pair of ranks). Bodies are opaque bytes; nothing is ever unpickled.

An unauthenticated client can hold one connection for at most `REQUEST_TIMEOUT_S`; it cannot end or block the
server, not even with more connections than the process may have files.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import io
import re
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# How long a GET is held; the client repeats it after a 404, so this only bounds the cost of a held socket.
HOLD_TIMEOUT_S = 5.0
# How long a connection may take to send its request, and a peer to read its answer.
REQUEST_TIMEOUT_S = 5.0
RESPONSE_TIMEOUT_S = 30.0
MAX_REQUEST_BYTES = 4 << 20
# Connections that have not shown the secret yet; one more closes the oldest. Linux gives a process 1,024
# files by default, and a rank's request arrives with its connection.
MAX_UNAUTHENTICATED = 512
# How long nothing is accepted when the process has no file for another connection.
NO_FILES_S = 0.1
_NO_FILES = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
CLOSE_TIMEOUT_S = 5.0
_GATHERED = re.compile(r"gathered\.(\d{1,6})\.(\d{1,6})", re.ASCII)


@dataclass
class _Scope:
    """One Gloo context's keys; `left` counts the ranks that have connected, `size` how many will.

    `addresses` are the values of the keys that are ranks: a rank's addresses for the others, one after the
    other, without one for itself.
    """

    values: dict[str, bytes] = field(default_factory=dict)
    addresses: dict[int, bytes] = field(default_factory=dict)
    left: int = 0
    size: int = 0


class Rendezvous:
    """A running rendezvous; `close()` ends it, and so does the end of its process.

    Args:
        host: the address to listen on: the loopback where all ranks share a host, else the address that the
            other hosts use for this one.
    """

    def __init__(self, host: str) -> None:
        self._scopes: dict[str, _Scope] = {}
        # Set when the key is there; for a size, when so many ranks have put their addresses.
        self._arrivals: dict[tuple[str, str | int], threading.Event] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._server = _Server(host, self.answer)
        # What HOROVOD_GLOO_RENDEZVOUS_ADDR has to be: address, port, and the secret that heads each path.
        self.address = f"{host}:{self._server.server_port}/{self._server.secret}"

    def close(self) -> None:
        """Stop listening and drop every connection; twice is harmless."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            for arrival in self._arrivals.values():
                arrival.set()
        self._server.close()

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(self, method: str, path: str, body: bytes) -> bytes | None:
        """Return the answer to an authenticated request, None for a key that does not arrive in
        `HOLD_TIMEOUT_S`.

        Raises:
            ValueError: Horovod's ranks do not send this.
        """
        scope_name, _, key = path.rpartition("/")
        if method == "GET":
            wanted = _GATHERED.fullmatch(key)
            if wanted:
                rank, size = int(wanted[1]), int(wanted[2])
                return self._wait_for(scope_name, size, lambda scope: _gathered(scope, rank, size))
            return self._wait_for(scope_name, key, lambda scope: scope.values.get(key))
        with self._lock:
            scope = self._scopes.setdefault(scope_name, _Scope())
            if method == "DELETE":
                _leave(scope)
                return b""
            scope.values[key] = body
            if key.isdecimal() and len(key) <= 6:
                scope.addresses[int(key)] = body
            for arrived in (key, len(scope.addresses)):
                if event := self._arrivals.pop((scope_name, arrived), None):
                    event.set()
        return b""

    def _wait_for(
        self, scope_name: str, what: str | int, find: Callable[[_Scope], bytes | None]
    ) -> bytes | None:
        end = time.monotonic() + HOLD_TIMEOUT_S
        while True:
            with self._lock:
                found = find(self._scopes.setdefault(scope_name, _Scope()))
                left_s = end - time.monotonic()
                if self._closing:
                    raise ConnectionAbortedError("the rendezvous is closed")
                if found is not None or left_s <= 0:
                    return found
                arrival = self._arrivals.setdefault((scope_name, what), threading.Event())
            arrival.wait(left_s)


def _gathered(scope: _Scope, rank: int, size: int) -> bytes | None:
    return addresses_for(rank, size, scope.addresses) if len(scope.addresses) >= size else None


def _leave(scope: _Scope) -> None:
    # A rank deletes after a barrier of its Gloo context: no rank requests these keys any more, and the next
    # hvd.init() may already put new ones while slower ranks still leave the old context.
    if scope.left == 0:
        scope.size = len(scope.addresses)
        scope.values, scope.addresses = {}, {}
    scope.left += 1
    if scope.left >= scope.size:
        scope.left = 0


def addresses_for(rank: int, size: int, addresses: Mapping[int, bytes]) -> bytes:
    """Return what the other ranks have put for ``rank``, in the order of ranks.

    Args:
        rank: the rank whose peers' addresses are returned.
        size: the number of ranks.
        addresses: by rank, its addresses for the others in the order of ranks, all of one length.

    Raises:
        ValueError: there are not ``size`` ranks, or their addresses are not of one length.

    >>> addresses_for(1, 3, {0: b"0101" b"0202", 1: b"1010" b"1212", 2: b"2020" b"2121"})
    b'01012121'
    """
    length, rest = divmod(len(addresses[0]) if 0 in addresses else 0, max(1, size - 1))
    if rest or rank >= size or addresses.keys() != set(range(size)):
        raise ValueError(f"rank {rank} of {size} requests addresses of {len(addresses)} ranks")
    if {len(each) for each in addresses.values()} != {length * (size - 1)}:
        raise ValueError(f"the addresses of {size} ranks are of different lengths")
    # A rank has none for itself, so its addresses for ranks above it are one place earlier.
    below, above = (rank - 1) * length, rank * length
    lower = [addresses[other][below : below + length] for other in range(rank)]
    return b"".join(lower + [addresses[other][above : above + length] for other in range(rank + 1, size)])


class _Server(ThreadingHTTPServer):
    """Python's server with a secret in each path, bounded in connections and in time."""

    request_queue_size = 4096
    daemon_threads = True

    def __init__(self, host: str, answer: Callable[[str, str, bytes], bytes | None]) -> None:
        self.answer = answer
        self.secret = secrets.token_urlsafe(24)
        self._connections: dict[socket.socket, threading.Thread] = {}
        # Those that have not shown the secret, the oldest first.
        self._unauthenticated: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__((host, 0), _Handler)
        self._thread = threading.Thread(
            target=self.serve_forever, args=(3600.0,), name="horovod-tune-rendezvous", daemon=True
        )
        self._thread.start()

    def server_bind(self) -> None:
        # Not HTTPServer's: it looks the host's name up, which takes seconds where there is no DNS.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if error.errno in _NO_FILES:
                # The kernel offers the connection again at once: without a pause this would be a busy loop.
                time.sleep(NO_FILES_S / 20 if self._drop_oldest() else NO_FILES_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        thread = threading.Thread(
            target=self.process_request_thread, args=(request, client_address), daemon=True
        )
        with self._lock:
            full = len(self._unauthenticated) >= MAX_UNAUTHENTICATED
            self._connections[request], self._unauthenticated[request] = thread, None
        if full:
            self._drop_oldest()
        thread.start()

    def _drop_oldest(self) -> bool:
        """End the oldest unauthenticated connection; return True if there was one."""
        with self._lock:
            oldest = next(iter(self._unauthenticated), None)
            if oldest is None:
                return False
            del self._unauthenticated[oldest]
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its own thread closes it
            return True

    def knows_secret(self, request: socket.socket, line: bytes) -> bool:
        """Return True if the first line of a request has the secret, and count it as authenticated."""
        path = line.partition(b" ")[2].partition(b" ")[0]
        # Horovod appends ":port" to the address that it is given, so that is at the end of the secret.
        given = path.lstrip(b"/").partition(b"/")[0].partition(b":")[0]
        if not hmac.compare_digest(given, self.secret.encode()):
            return False
        with self._lock:
            self._unauthenticated.pop(request, None)
        return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._unauthenticated.pop(request, None)
            super().shutdown_request(request)
            self._connections.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that send garbage or disconnect: the trial's log needs no traceback of them."""

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_RDWR)  # `serve_forever` looks for the end when it is woken
        self.shutdown()
        self.server_close()
        with self._lock:
            threads = [self._thread, *self._connections.values()]
            for each in self._connections:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        end = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))


class _UntilDeadline(io.RawIOBase):
    """Reads from a socket until ``REQUEST_TIMEOUT_S`` after it was made, however slowly bytes arrive."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._end = time.monotonic() + REQUEST_TIMEOUT_S

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._connection.settimeout(left_s)
        return self._connection.recv_into(buffer)


class _Handler(BaseHTTPRequestHandler):
    """One request; a connection without the secret, or with garbage, is closed without an answer."""

    server: _Server
    raw_requestline: bytes

    def setup(self) -> None:
        self.connection = self.request
        self.rfile = io.BufferedReader(_UntilDeadline(self.connection))
        self.wfile = io.BytesIO()  # `answer` is sent without it

    def parse_request(self) -> bool:
        return self.server.knows_secret(self.connection, self.raw_requestline) and super().parse_request()

    def do_GET(self) -> None:
        given = self.headers.get("Content-Length", "0")
        # Python refuses to read numbers of thousands of digits.
        length = int(given) if given.isascii() and given.isdigit() and len(given) < 20 else -1
        if not 0 <= length <= MAX_REQUEST_BYTES:
            raise ValueError(f"not a length of a request: {given:.40}")
        body = self.rfile.read(length)
        if len(body) < length:
            raise ValueError("the client has gone")
        path = self.path.lstrip("/").partition("/")[2]
        answer = self.server.answer(self.command, path, body)
        status = "404 Not Found" if answer is None else "200 OK"
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(answer or b'')}\r\nConnection: close\r\n\r\n"
        self.connection.settimeout(RESPONSE_TIMEOUT_S)  # for all of it
        self.connection.sendall(head.encode() + (answer or b""))
        self.close_connection = True

    do_PUT = do_DELETE = do_GET

    def send_error(self, *_: Any) -> None:
        self.close_connection = True

    def log_message(self, *_: Any) -> None: ...
