"""Runs in each rank: its connection to the TCPStore of a world, and the states that ranks publish there."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

from horovod_tune.actors.sockets import open_tcp_sockets, shut_down
from horovod_tune.messages import RankInfo

# The prefix of our keys: a training function may use the store too.
PREFIX = "horovod_tune"


class WorldStore:
    """This rank's connection to its world's store, which rank 0 serves. ``dist`` is `torch.distributed`."""

    def __init__(self, dist: Any, world: RankInfo) -> None:
        self.world, self._dist, self._groups_made = world, dist, 0
        self._keys: Any = None
        self.port: int | None = None
        self.is_closed = False

    def connect(self, timeout: timedelta) -> None:
        """Connect to the store at MASTER_ADDR; ``timeout`` limits this and later waits."""
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = self._dist.TCPStore(*address, is_master=False, timeout=timeout)
        self.port, self._keys = store.port, self._dist.PrefixStore(PREFIX, store)

    def for_next_group(self) -> Any:
        """Return the store with a new prefix, so that a group does not find an earlier group's keys."""
        self._groups_made += 1
        return self._dist.PrefixStore(f"group {self._groups_made}", self._keys)

    def wait_for_others(self, timeout: timedelta) -> None:
        """Return when every rank has called this. Later waits may take ``timeout``."""
        wait_for_all(self._keys, "made", self.world.size)
        self._keys.set_timeout(timeout)

    def publish(self, what: str) -> None:
        """Publish the state ``what`` of this rank; other ranks read it with `ranks`."""
        with contextlib.suppress(RuntimeError, AttributeError):  # the store has ended, or was not reached
            self._keys.set(f"{what}.{self.world.rank}", "")

    def ranks(self, what: str, *, published: bool = True) -> dict[int, str]:
        """Return the ranks that have published ``what``, or have not, in the form of `AwaitedRanks.names`."""
        with contextlib.suppress(RuntimeError, AttributeError):
            ranks = [
                rank for rank in range(self.world.size) if self._keys.check([f"{what}.{rank}"]) is published
            ]
            return dict.fromkeys(ranks, "a collective")
        return {}

    def serve_until_all_ended(self) -> None:
        """On rank 0, whose process has the store, wait until the other ranks no longer need it.

        A rank that never ends is the coordinator's matter: its `close` ends this wait too.
        """
        if self.world.rank == 0:
            with contextlib.suppress(RuntimeError):
                self._keys.wait([f"ended.{rank}" for rank in range(1, self.world.size)], timedelta(days=365))

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
