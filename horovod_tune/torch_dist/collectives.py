"""Runs in each rank: torch's collectives for `horovod_tune.commit` and `horovod_tune.get_state`."""

from __future__ import annotations

import sys
from typing import Any

from horovod_tune.session.session import WorldBroken
from horovod_tune.torch_dist.process_groups import ProcessGroups


class TorchCollectives:
    """Implements `Collectives` with the default process group."""

    init_call = "dist.init_process_group()"

    def __init__(self, groups: ProcessGroups, use_gpu: bool) -> None:
        self._groups, self._use_gpu = groups, use_gpu

    def are_ready(self) -> bool:
        """Wait for the GPU, then return True unless the training function has destroyed the default group.

        Raises:
            WorldBroken: a collective on the GPU has failed, perhaps during this wait.
        """
        if self._use_gpu and (cuda := sys.modules["torch"].cuda).is_initialized():
            cuda.synchronize()
            if self._groups.are_aborted:
                raise WorldBroken("a collective on the GPU has failed")
        return bool(self._groups.dist.is_initialized())

    def any(self, flag: bool) -> bool:
        """Return True if ``flag`` is true on any rank."""
        return True in self._gather(flag)

    def newest(self, number: int, state: Any) -> tuple[int, Any]:
        """Return the largest ``number`` of any rank, and that rank's ``state``."""
        numbers = self._gather(number)
        largest = max(numbers)
        if min(numbers) == largest:
            return number, state
        states = [state]
        self._groups.dist.broadcast_object_list(states, src=numbers.index(largest))
        return largest, states[0]

    def _gather(self, value: Any) -> list[Any]:
        values = [None] * self._groups.dist.get_world_size()
        self._groups.dist.all_gather_object(values, value)
        return values
