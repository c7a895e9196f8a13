"""Which hosts are about to go: a cloud said so, somebody drains a node, or the whole job is near its end."""

from __future__ import annotations

import time
from collections.abc import Callable

from horovod_tune import ray_compat

LOOK_EVERY_S = 2.0


class DrainingHosts:
    """The ids of the nodes that are about to go, asked of Ray now and then."""

    def __init__(self, ask: Callable[[], set[str]] | None = None) -> None:
        self._ask = ask or ray_compat.draining_nodes
        self._asked: float | None = None
        self.nodes: set[str] = set()

    def look(self) -> bool:
        """Ask again if it is time to; return whether there are others than before."""
        now = time.monotonic()
        if self._asked is not None and now - self._asked < LOOK_EVERY_S:
            return False
        self._asked, before = now, self.nodes
        self.nodes = self._ask()
        return self.nodes != before
