"""Runs in each rank: applies a growth policy to a global batch."""

from __future__ import annotations

from typing import Any

from horovod_tune.large_batch import bounds
from horovod_tune.large_batch.global_batch import GlobalBatch
from horovod_tune.large_batch.growing.policies import GrowthPolicy


class BatchGrowth:
    """Grows the global batch as a policy says: by more passes on each rank, and the rate with it.

    Memory and data loading stay as they are. Where workers join, the same batch takes each fewer passes.

    Args:
        policy: Says when.
        batch: What grows: the `batch` of `from_config`, or one of your own.
        max_global_batch_size: Where growth ends.
        decay_at_limit: Whether the rate falls by the part of a growth that the limit does not allow (Smith et
            al. 2018, arXiv:1711.00489: first the batch grows, then the rate decays).

    Raises:
        HyperparameterError: The limit is below the batch at the start.
    """

    def __init__(
        self,
        policy: GrowthPolicy,
        batch: GlobalBatch,
        *,
        max_global_batch_size: int,
        decay_at_limit: bool = False,
    ) -> None:
        bounds.count("max_global_batch_size", max_global_batch_size, batch.split.global_batch_size)
        self.policy = policy
        self.batch = batch
        self._limit = max_global_batch_size
        self._decay_at_limit = decay_at_limit

    def update(self, measure: Any = None) -> bool:
        """Ask the policy, between two optimiser steps, and return whether the batch has grown.

        Args:
            measure: What the policy looks at: a `NoiseEstimate`, an eigenvalue, or None. The same on all
                ranks.
        """
        size = self.batch.split.global_batch_size
        wanted = self.policy.growth(float(self.batch.scheduler.epoch), size, measure)
        bounds.count("growth", wanted)
        # More workers may have brought the batch beyond the limit: it does not shrink for that.
        factor = max(1, min(wanted, self._limit // size))
        if factor > 1:
            self.batch.resize(size * factor)
        if self._decay_at_limit and factor < wanted:
            self.batch.scheduler.reduce(factor / wanted)
        return factor > 1

    def state_dict(self) -> dict[str, Any]:
        """Return batch and policy as plain numbers."""
        return {"batch": self.batch.state_dict(), "policy": self.policy.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict`, in a world of any size; load the scheduler's state before."""
        self.policy.load_state_dict(state_dict["policy"])
        self.batch.load_state_dict(state_dict["batch"])
