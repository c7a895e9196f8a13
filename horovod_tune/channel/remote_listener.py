"""Lets ranks on other hosts be let go by one small message a host, which a rank there hands on to the others.

Through Ray a release is a call of 0.1 to 0.2 ms of the coordinator's time for each rank: with 500 of them ten
reports a second. So the first rank of each other host connects to the coordinator, over TCP, and the other
ranks of its host connect to it. Both listen only while the ranks of one world connect. A rank shows the
secret that came with its assignment; who shows another is turned away. A connection that is lost loses
nothing: what it would have carried goes through Ray. Each world of an elastic trial has connections of its
own.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Iterator, Mapping

from horovod_tune.channel.listener import ChannelToken, prepare

# How long ranks that have said that they are connected may take to appear here.
ACCEPT_S = 1.0
# Connections that have not shown a secret; with one more the oldest goes.
MAX_STRANGERS = 1024
_SECRET_BYTES = 32
_NUMBER_BYTES = 4


def relay_tokens(workers: list[int]) -> dict[int, ChannelToken]:
    """Return what each of ``workers`` shows to the first rank of its host, which `listen_here` for them."""
    address = b"\0horovod_tune_" + secrets.token_hex(16).encode()
    return {worker: ChannelToken(address, _new_secret(worker), by_rank=True) for worker in workers}


def listen_here(tokens: Mapping[int, ChannelToken]) -> RemoteListener:
    """Listen for the ranks of this host that `relay_tokens` were made for.

    Raises:
        OSError: the address is taken.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(next(iter(tokens.values())).address)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return RemoteListener(listener, {worker: token.secret for worker, token in tokens.items()})


def listen_for_hosts(host: str) -> RemoteListener:
    """Listen for ranks of other hosts, which reach this one by the address ``host``."""
    return RemoteListener(socket.create_server((host, 0), backlog=4096), {})


class RemoteListener:
    """Accepts the ranks of one world that know a secret while they connect, and no longer."""

    def __init__(self, listener: socket.socket, expected: Mapping[int, bytes]) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._secrets = dict(expected)
        self._is_stopped = False

    def create_token(self, worker: int) -> ChannelToken:
        self._secrets[worker] = _new_secret(worker)
        return ChannelToken(self._listener.getsockname()[:2], self._secrets[worker])

    def accept(self, wait_s: float = ACCEPT_S) -> dict[int, socket.socket]:
        """Return the ends of the workers that connect within ``wait_s``, by index, and stop listening."""
        return dict(self.accept_each(wait_s))

    def accept_each(self, wait_s: float) -> Iterator[tuple[int, socket.socket]]:
        """Yield what `accept` returns as they come; it must be read to its end."""
        strangers: dict[socket.socket, bytearray] = {}
        gives_up = time.monotonic() + wait_s
        with self._listener, selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while self._secrets and not self._is_stopped and (left_s := gives_up - time.monotonic()) > 0:
                for key, _ in selector.select(left_s):
                    end = key.fileobj
                    assert isinstance(end, socket.socket)
                    if end is self._listener:
                        self._admit(selector, strangers)
                    elif end in strangers:  # not dropped a moment ago
                        worker = self._hear(end, selector, strangers)
                        if worker is not None:
                            yield worker, end
            for end in strangers:
                end.close()

    def stop(self) -> None:
        """Let an `accept` that waits in another thread end now."""
        self._is_stopped = True
        with contextlib.suppress(OSError):  # it has ended
            self._listener.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening; twice is harmless."""
        self._listener.close()

    def _admit(self, selector: selectors.BaseSelector, strangers: dict[socket.socket, bytearray]) -> None:
        try:
            end, _ = self._listener.accept()
        except OSError:  # it has gone again
            return
        if len(strangers) >= MAX_STRANGERS:
            oldest = next(iter(strangers))
            del strangers[oldest]
            selector.unregister(oldest)
            oldest.close()
        end.setblocking(False)
        strangers[end] = bytearray()
        selector.register(end, selectors.EVENT_READ)

    def _hear(
        self,
        end: socket.socket,
        selector: selectors.BaseSelector,
        strangers: dict[socket.socket, bytearray],
    ) -> int | None:
        """Take what a connection shows; when that is all, return whose end it is, or close it."""
        shown = strangers[end]
        try:
            received = end.recv(_NUMBER_BYTES + _SECRET_BYTES - len(shown))
        except BlockingIOError:
            return None
        except OSError:
            received = b""
        shown += received
        if received and len(shown) < _NUMBER_BYTES + _SECRET_BYTES:
            return None
        selector.unregister(end)
        del strangers[end]
        worker = int.from_bytes(shown[:_NUMBER_BYTES], "big")
        secret = self._secrets.get(worker)
        if secret is not None and hmac.compare_digest(secret, shown):
            del self._secrets[worker]
            end.setblocking(True)
            prepare(end)
            return worker
        end.close()
        return None


def _new_secret(worker: int) -> bytes:
    return worker.to_bytes(_NUMBER_BYTES, "big") + secrets.token_bytes(_SECRET_BYTES)
