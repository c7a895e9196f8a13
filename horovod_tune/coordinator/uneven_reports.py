"""Finds ranks that report more often than rank 0 and so wait for it, while it waits for them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set

from horovod_tune.messages import Failed, FailureKind, LongWait

# How often to request the ranks' stacks while a rank is ahead of rank 0.
STACK_INTERVAL_S = 5.0
# How long no stack may have changed. A collective of large tensors also takes some seconds.
STUCK_S = 20.0
# The files in which ranks wait in collectives.
_COLLECTIVES = re.compile(
    r"/(torch/distributed/(distributed_c10d|_functional_collectives)|torch/nn/parallel/distributed"
    r"|horovod/(torch|tensorflow)/mpi_ops|horovod/common/\w+)\.py$"
)


def is_in_collective(stack: str) -> bool:
    r"""Return True if a training function's stack ends in a collective.

    >>> is_in_collective('  File "/lib/horovod/torch/mpi_ops.py", line 3, in synchronize\n    wait()\n')
    True
    >>> is_in_collective('  File "/lib/torch/distributed/checkpoint/filesystem.py", line 3, in save\n')
    False
    """
    files = re.findall(r'^  File "([^"]+)", line', stack, re.MULTILINE)
    return bool(files and _COLLECTIVES.search(files[-1]))


class UnevenReports:
    """The ranks that wait in a report, and all ranks' stacks.

    That a rank is one report ahead is normal: rank 0 may evaluate or save by itself.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, int] = {}
        self._stacks: dict[int, str] = {}
        self._unchanged_since = self._next_request_s = 0.0

    def record_wait(self, message: LongWait) -> None:
        self._waiting[message.rank] = message.report

    def record_stack(self, rank: int, stack: str, now: float) -> None:
        if self._stacks.get(rank) != stack:
            self._stacks[rank], self._unchanged_since = stack, now

    def ahead(self, reports: int) -> dict[int, int]:
        """Return the number of the report in which each rank waits that is ahead of rank 0's ``reports``."""
        return {rank: report for rank, report in self._waiting.items() if report > reports}

    def request_is_due(self, reports: int, now: float) -> bool:
        """Return True if all ranks' stacks should be requested now."""
        if not self.ahead(reports) or now < self._next_request_s:
            return False
        self._next_request_s = now + STACK_INTERVAL_S
        return True

    def find(self, reports: int, hosts: Mapping[int, str], running: Set[int], now: float) -> Failed | None:
        """Return the failure of a rank that is ahead if no other rank can go on."""
        others = running - self.ahead(reports).keys()
        if 0 not in others or now - self._unchanged_since < STUCK_S:
            return None
        if not all(is_in_collective(self._stacks.get(rank, "")) for rank in others):
            return None
        return self.failure(reports, hosts)

    def failure(self, reports: int, hosts: Mapping[int, str]) -> Failed | None:
        """Return the failure of a rank that is ahead; None if there is none."""
        for rank, report in sorted(self.ahead(reports).items()):
            if rank in hosts:
                stack = self._stacks.get(0, "")
                where = f"\nRank 0's training function is at:\n{stack}" if stack else ""
                text = (
                    f"it waits in its report() number {report}, while rank 0, which has made {reports}, "
                    "waits in a collective: call report() equally often on every rank, or on rank 0 only"
                    + where
                )
                return Failed(rank, hosts[rank], FailureKind.AHEAD, text)
        return None
