"""The rendezvous of a world: the key-value server that Horovod's Gloo ranks find each other through.

Runs as one thread in the coordinator. It speaks the little HTTP that Horovod 0.28's `http_store.cc` sends:
one request a connection, PUT and GET of ``/scope/key``, DELETE when a rank has connected. It differs from
Horovod's own server in four ways: a GET for a key that is not there yet is held until it comes (the stock
client otherwise asks again every 10 ms), the listen backlog takes a whole world at once (the stock 5 drops
connections, which are retried after seconds), every path starts with a secret that only this trial's
ranks were given, and ``gathered.RANK.SIZE`` gives all that the other ranks have put for RANK in one answer,
so that a world needs three requests a rank (Horovod as `horovod-tune install-horovod` builds it; another
makes some for each pair of ranks). Bodies are opaque bytes; nothing is ever unpickled.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from horovod_tune.gloo.http_server import Connection, SecretHttpServer

# How long a GET is held; the client asks again after a 404, so this only bounds what a held socket costs.
HOLD_S = 5.0
# After how many GETs for a key those are forgotten that have given up, or were told to ask again.
FORGET_EVERY = 1000
_GATHERED = re.compile(r"gathered\.(\d{1,6})\.(\d{1,6})", re.ASCII)


@dataclass
class _Scope:
    """One Gloo context's keys; `left` counts the ranks that have connected, `size` how many will.

    `addresses` are the values of the keys that are ranks: a rank's addresses for the others, one after the
    other, without one for itself.
    """

    values: dict[str, bytes] = field(default_factory=dict)
    addresses: dict[int, bytes] = field(default_factory=dict)
    # By the size of the world and the rank: who waits for the addresses of all.
    gathering: dict[int, dict[int, Connection]] = field(default_factory=dict)
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
            if key.isdecimal() and len(key) <= 6:
                scope.addresses[int(key)] = body
            self._server.reply(connection, b"")
            for waiting in self._held.pop((scope_name, key), ()):
                self._server.reply(waiting, body)
            size = len(scope.addresses)
            for rank, waiting in scope.gathering.pop(size, {}).items():
                self._reply_gathered(waiting, scope, rank, size)
        elif method == b"GET":
            wanted = _GATHERED.fullmatch(key)
            if wanted:
                self._gather(connection, scope, int(wanted[1]), int(wanted[2]))
            elif key in scope.values:
                self._server.reply(connection, scope.values[key])
            else:
                self._hold(connection, (scope_name, key))
        elif method == b"DELETE":
            self._leave(scope)
            self._server.reply(connection, b"")
        else:
            self._server.drop(connection)

    def _gather(self, connection: Connection, scope: _Scope, rank: int, size: int) -> None:
        if len(scope.addresses) >= size:
            self._reply_gathered(connection, scope, rank, size)
        else:
            connection.expires = time.monotonic() + HOLD_S
            scope.gathering.setdefault(size, {})[rank] = connection

    def _reply_gathered(self, connection: Connection, scope: _Scope, rank: int, size: int) -> None:
        try:
            self._server.reply(connection, addresses_for(rank, size, scope.addresses))
        except ValueError:  # not what Horovod's ranks send
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
            scope.size = len(scope.addresses)
            scope.values, scope.addresses = {}, {}
        scope.left += 1
        if scope.left >= scope.size:
            scope.left = 0


def addresses_for(rank: int, size: int, addresses: Mapping[int, bytes]) -> bytes:
    """Return what the other ranks have put for ``rank``, in the order of ranks.

    Args:
        rank: whose peers are meant.
        size: the number of ranks.
        addresses: by rank, its addresses for the others in the order of ranks, all of one length.

    Raises:
        ValueError: there are others than ``size`` ranks, or their addresses are not of one length.

    >>> addresses_for(1, 3, {0: b"0101" b"0202", 1: b"1010" b"1212", 2: b"2020" b"2121"})
    b'01012121'
    """
    length, rest = divmod(len(addresses[0]) if 0 in addresses else 0, max(1, size - 1))
    if rest or rank >= size or addresses.keys() != set(range(size)):
        raise ValueError(f"rank {rank} of {size} asks for addresses of {len(addresses)} ranks")
    if {len(each) for each in addresses.values()} != {length * (size - 1)}:
        raise ValueError(f"the addresses of {size} ranks are of different lengths")
    # A rank has none for itself, so its addresses for ranks above it are one place earlier.
    below, above = (rank - 1) * length, rank * length
    lower = [addresses[other][below : below + length] for other in range(rank)]
    return b"".join(lower + [addresses[other][above : above + length] for other in range(rank + 1, size)])
