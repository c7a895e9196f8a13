"""Runs in each rank: its connection to the TCPStore of a world, and the states that ranks publish there."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

from horovod_tune.actors.sockets import open_tcp_sockets, shut_down
from horovod_tune.messages import RankInfo


class WorldStore:
    """This rank's connection to one world's store; the world's keys begin with its ``name``.

    ``dist`` is the module `torch.distributed`.
    """

    def __init__(self, dist: Any, world: RankInfo, name: str) -> None:
        self.world, self._dist, self._name, self._groups_made = world, dist, name, 0
        self._store: Any = None
        self.port: int | None = None
        self.is_closed = False

    def connect(self, timeout: timedelta) -> None:
        """Connect to the store at MASTER_ADDR; ``timeout`` limits this and later waits.

        Rank 0 deletes what earlier trials left: a function may use the store, with the same keys each time.
        """
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = self._dist.TCPStore(*address, is_master=False, timeout=timeout)
        self.port = self._store.port
        # No function has been called yet in this world, which needs rank 0.
        if self.world.rank == 0:
            for key in getattr(self._store, "list_keys", list)():  # which older releases lack
                if not key.startswith(f"{self._name}."):
                    self._store.delete_key(key)

    def for_next_group(self) -> Any:
        """Return the store with a new prefix, so that a group does not find an earlier group's keys."""
        self._groups_made += 1
        return self._dist.PrefixStore(f"{self._name}.{self._groups_made}", self._store)

    def wait_for_others(self, timeout: timedelta) -> None:
        """Return when every rank has called this. Later waits may take ``timeout``."""
        wait_for_all(self._store, f"{self._name}.made", self.world.size)
        self._store.set_timeout(timeout)

    def publish(self, what: str) -> None:
        """Publish the state ``what`` of this rank; other ranks read it with `ranks`."""
        with contextlib.suppress(RuntimeError, AttributeError):  # the store has ended, or was not reached
            self._store.set(f"{self._name}.{what}.{self.world.rank}", "")

    def ranks(self, what: str, *, published: bool = True) -> dict[int, str]:
        """Return the ranks that have published ``what``, or have not, in the form of `AwaitedRanks.names`."""
        keys = {rank: f"{self._name}.{what}.{rank}" for rank in range(self.world.size)}
        with contextlib.suppress(RuntimeError, AttributeError):
            ranks = [rank for rank, key in keys.items() if self._store.check([key]) is published]
            return dict.fromkeys(ranks, "a collective")
        return {}

    def close(self) -> None:
        """End this rank's waits in the store."""
        self.is_closed = True
        if self.port is not None:
            others = open_tcp_sockets(except_port=self.port)
            shut_down(open_tcp_sockets(before=others))


def wait_for_all(store: Any, what: str, size: int, timeout: timedelta | None = None) -> None:
    """Return when ``size`` ranks have called this for the key ``what``."""
    if store.add(what, 1) == size:
        store.set(f"{what}.all", "")
    store.wait([f"{what}.all"], *([timeout] if timeout else []))
