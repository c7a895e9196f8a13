"""The rendezvous of a world: the key-value server through which Horovod's Gloo ranks find each other.

Runs in the coordinator, in one thread. It responds to the requests of Horovod 0.28's `http_store.cc`: one
request per connection, PUT and GET of ``/scope/key``, DELETE when a rank has connected. Unlike Horovod's own
server, it holds a GET until the key is there (the stock client repeats it every 10 ms), has a backlog for a
whole world's connections (with Horovod's of 5, clients retry after seconds), requires paths that start with a
secret of this trial, and returns for ``gathered.RANK.SIZE`` what the other ranks have put for RANK. A build
by `horovod-tune install-horovod` thus makes three requests per rank and Gloo context, others several for each
pair of ranks. Bodies are opaque bytes; nothing is ever unpickled.

An unauthenticated client can hold one connection for at most `REQUEST_TIMEOUT_S`; it cannot end or block the
server, not even with more connections than the process may have file descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

# How long a GET is held; the client repeats it after a 404, so this only bounds the cost of a held socket.
HOLD_TIMEOUT_S = 5.0
# How long a connection may take to send its request, and a peer to read its response.
REQUEST_TIMEOUT_S = 5.0
RESPONSE_TIMEOUT_S = 30.0
MAX_REQUEST_BYTES = 4 << 20
# Maximum connections that have not sent the secret; one more closes the oldest. That is never a rank's, which
# sends its request as soon as it connects. Linux allows a process 1,024 file descriptors by default.
MAX_UNAUTHENTICATED = 512
# How long to accept nothing when the process has no file descriptor for another connection.
NO_FILES_S = 0.01
BACKLOG = 4096
CLOSE_TIMEOUT_S = 5.0
_GATHERED = re.compile(r"gathered\.(\d{1,6})\.(\d{1,6})", re.ASCII)


@dataclass
class _Scope:
    """One Gloo context's keys; `left` of its `size` ranks have sent DELETE."""

    values: dict[str, bytes] = field(default_factory=dict)
    # What each rank has put with its own number as the key: its addresses for the other ranks, joined.
    addresses: dict[int, bytes] = field(default_factory=dict)
    left: int = 0
    size: int = 0

    def put(self, key: str, body: bytes) -> None:
        self.values[key] = body
        if key.isdecimal() and len(key) <= 6:
            self.addresses[int(key)] = body

    def gathered(self, rank: int, size: int) -> bytes | None:
        return addresses_for(rank, size, self.addresses) if len(self.addresses) >= size else None

    def leave(self) -> None:
        # A rank sends DELETE after a barrier of its Gloo context: no rank requests these keys any more. Fast
        # ranks may put keys for their next hvd.init() while slower ones have not left the old context yet.
        if self.left == 0:
            self.size = len(self.addresses)
            self.values, self.addresses = {}, {}
        self.left += 1
        if self.left >= self.size:
            self.left = 0


class Rendezvous:
    """A running rendezvous; `close()` ends it, and so does the end of its process.

    Args:
        host: the address to listen on: the loopback if all ranks are on this host, otherwise the address that
            the other hosts use for this one.
    """

    def __init__(self, host: str) -> None:
        self._scopes: dict[str, _Scope] = {}
        # Events by scope and key, set when the key arrives, and by scope and size, set when that many ranks
        # have put their addresses.
        self._arrivals: dict[tuple[str, str | int], asyncio.Event] = {}
        # The connections that have not sent the secret, the oldest first.
        self._unauthenticated: dict[asyncio.StreamWriter, None] = {}
        self._secret = secrets.token_urlsafe(24)
        self._end: Future[None] = Future()
        self._listener = socket.create_server((host, 0), backlog=BACKLOG)
        self._listener.setblocking(False)
        # The value of HOROVOD_GLOO_RENDEZVOUS_ADDR: address, port, and the secret that begins each path.
        self.address = f"{host}:{self._listener.getsockname()[1]}/{self._secret}"
        self._serves: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="horovod-tune-rendezvous", daemon=True)
        self._thread.start()
        self._serves.result()

    def close(self) -> None:
        """Stop listening and drop every connection; may be called twice."""
        with contextlib.suppress(InvalidStateError):
            self._end.set_result(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except OSError as error:  # no file descriptor is left for the event loop
            self._listener.close()
            self._serves.set_exception(error)

    async def _serve(self) -> None:
        self._serves.set_result(None)
        with self._listener:
            accepting = asyncio.create_task(self._accept())
            await asyncio.wrap_future(self._end)
            accepting.cancel()  # `asyncio.run` then cancels the tasks of the connections

    async def _accept(self) -> None:
        loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        while True:
            try:
                client, _ = await loop.sock_accept(self._listener)
            except OSError:  # no file descriptor is left for another connection
                self._drop_oldest()
                await asyncio.sleep(NO_FILES_S)
                continue
            task = asyncio.create_task(self._handle(client))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    def _drop_oldest(self) -> None:
        """End the oldest unauthenticated connection, if there is one."""
        if self._unauthenticated:
            oldest = next(iter(self._unauthenticated))
            del self._unauthenticated[oldest]
            oldest.transport.abort()

    async def _handle(self, client: socket.socket) -> None:
        """Respond to one request, or close the connection if it sends garbage or lacks the secret."""
        reader, writer = await asyncio.open_connection(sock=client)
        self._unauthenticated[writer] = None
        if len(self._unauthenticated) > MAX_UNAUTHENTICATED:
            self._drop_oldest()
        errors = (OSError, ValueError, EOFError, asyncio.TimeoutError)
        try:
            with contextlib.suppress(*errors):
                request = await asyncio.wait_for(self._read(reader, writer), REQUEST_TIMEOUT_S)
                if self._end.done():  # before Python 3.12, `wait_for` may lose a cancellation
                    return
                answer = await self.answer(*request)
                status = "404 Not Found" if answer is None else "200 OK"
                size = len(answer or b"")
                head = f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\nConnection: close\r\n\r\n"
                writer.transport.set_write_buffer_limits(0)  # `drain` returns when all of it is sent
                writer.write(head.encode() + (answer or b""))
                await asyncio.wait_for(writer.drain(), RESPONSE_TIMEOUT_S)
        finally:
            self._unauthenticated.pop(writer, None)
            writer.transport.abort()

    async def _read(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[str, str, bytes]:
        """Return a request's method, path without the secret, and body; ValueError if it is malformed."""
        method, path, _ = (await reader.readline()).split(b" ", 2)
        # Horovod appends ":port" to the address that it is given; the port therefore follows the secret.
        given, _, path = path.lstrip(b"/").partition(b"/")
        if not hmac.compare_digest(given.partition(b":")[0], self._secret.encode()):
            raise ValueError("no secret")
        self._unauthenticated.pop(writer, None)
        length = b"0"
        while (header := await reader.readline()).strip():
            name, _, value = header.partition(b":")
            if name.lower() == b"content-length":
                length = value.strip()
        # Python refuses to read numbers of thousands of digits.
        if not header or not length.isdigit() or len(length) > 20 or int(length) > MAX_REQUEST_BYTES:
            raise ValueError(f"invalid Content-Length: {length!r:.40}")
        return method.decode(), path.decode(), await reader.readexactly(int(length))

    async def answer(self, method: str, path: str, body: bytes) -> bytes | None:
        """Return the response to an authenticated request; None if a key does not arrive in `HOLD_TIMEOUT_S`.

        Raises:
            ValueError: the request is not one that Horovod's ranks send.
        """
        name, _, key = path.rpartition("/")
        scope = self._scopes.setdefault(name, _Scope())
        match method:
            case "GET":
                wanted = _GATHERED.fullmatch(key)
                if wanted:
                    rank, size = int(wanted[1]), int(wanted[2])
                    return await self._wait_for((name, size), lambda: scope.gathered(rank, size))
                return await self._wait_for((name, key), lambda: scope.values.get(key))
            case "PUT":
                scope.put(key, body)
                for arrived in (key, len(scope.addresses)):
                    if event := self._arrivals.pop((name, arrived), None):
                        event.set()
            case "DELETE":
                scope.leave()
            case _:
                raise ValueError(f"unknown method {method!r:.40}")
        return b""

    async def _wait_for(self, what: tuple[str, str | int], find: Callable[[], bytes | None]) -> bytes | None:
        async def wait() -> Any:
            while (found := find()) is None:
                await self._arrivals.setdefault(what, asyncio.Event()).wait()
            return found

        try:
            return await asyncio.wait_for(wait(), HOLD_TIMEOUT_S)
        except asyncio.TimeoutError:
            return None


def addresses_for(rank: int, size: int, addresses: Mapping[int, bytes]) -> bytes:
    """Return what the other ranks of ``size`` have put for ``rank``, in the order of ranks.

    ``addresses`` are each rank's addresses for the other ranks, joined in their order; all of one length.

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
