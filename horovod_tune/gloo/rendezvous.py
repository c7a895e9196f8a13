"""The rendezvous of a world: the key-value server that Horovod's Gloo ranks find each other through.

Runs as one thread in the coordinator. It speaks the little HTTP that Horovod 0.28's `http_store.cc` sends:
one request a connection, PUT and GET of ``/scope/key``, DELETE when a rank has connected. It differs from
Horovod's own server in three ways: a GET for a key that is not there yet is held until it comes (the stock
client otherwise asks again every 10 ms), the listen backlog takes a whole world at once (the stock 5 drops
connections, which are retried after seconds), and every path starts with a secret that only this trial's
ranks were given. Bodies are opaque bytes; nothing is ever unpickled.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from horovod_tune.gloo.http_server import Connection, SecretHttpServer

# How long a GET is held; the client asks again after a 404, so this only bounds what a held socket costs.
HOLD_S = 5.0
# After how many GETs for a key those are forgotten that have given up, or were told to ask again.
FORGET_EVERY = 1000


@dataclass
class _Scope:
    """One Gloo context's keys; `left` counts the ranks that have connected, `size` how many will."""

    values: dict[str, bytes] = field(default_factory=dict)
    left: int = 0
    size: int = 0


class Rendezvous:
    """A running rendezvous; `close()` ends it, and so does the end of its process.

    Args:
        host: the address to listen on: the loopback where all ranks share a host, else the address that the
            other hosts reach this one by.
    """

    def __init__(self, host: str) -> None:
        self._scopes: dict[str, _Scope] = {}
        self._held: dict[tuple[str, str], list[Connection]] = {}
        self._server = SecretHttpServer(host, self._answer)
        # What HOROVOD_GLOO_RENDEZVOUS_ADDR has to be: address, port, and the secret that heads each path.
        self.address = self._server.address

    def close(self) -> None:
        """Stop listening and drop every connection; twice is harmless."""
        self._server.close()

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, connection: Connection, method: bytes, path: str, body: bytes) -> None:
        scope_name, _, key = path.rpartition("/")
        scope = self._scopes.setdefault(scope_name, _Scope())
        if method == b"PUT":
            scope.values[key] = body
            self._server.reply(connection, b"")
            for waiting in self._held.pop((scope_name, key), ()):
                self._server.reply(waiting, body)
        elif method == b"GET":
            if key in scope.values:
                self._server.reply(connection, scope.values[key])
            else:
                self._hold(connection, (scope_name, key))
        elif method == b"DELETE":
            self._leave(scope)
            self._server.reply(connection, b"")
        else:
            self._server.drop(connection)

    def _hold(self, connection: Connection, name: tuple[str, str]) -> None:
        connection.expires = time.monotonic() + HOLD_S
        waiting = self._held.setdefault(name, [])
        if len(waiting) % FORGET_EVERY == FORGET_EVERY - 1:
            waiting[:] = [each for each in waiting if self._server.is_open(each)]
        waiting.append(connection)

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
