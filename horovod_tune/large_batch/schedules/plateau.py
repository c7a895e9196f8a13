"""`ReduceLROnPlateau` on a metric averaged over the ranks."""

from __future__ import annotations

import math
from typing import Any

import torch

from horovod_tune.large_batch import bounds
from horovod_tune.large_batch.schedules.scheduler import LargeBatchLR
from horovod_tune.large_batch.world import gather


class ReduceLROnPlateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    r"""torch's scheduler of this name, on the metric's mean over all ranks.

    .. math:: \bar m = \sum_r n_r m_r \big/ \sum_r n_r

    Every rank adds the same numbers in the same order, so that all reduce at the same step. `step(metric)`
    is a collective: all ranks call it.

    Args:
        optimizer: As for torch.
        schedule: The `LargeBatchLR` of the optimiser, where there is one: its rates are reduced then, also
            those to come. `min_lr` is a part of the schedule's rate then (0.01: never below a hundredth).
        **options: torch's: ``mode``, ``factor``, ``patience``, ``threshold``, ``threshold_mode``,
            ``cooldown``, ``min_lr``, ``eps``.

    >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    >>> scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    >>> for loss in (3.0, 3.5):
    ...     scheduler.step(loss, samples=100)
    >>> optimizer.param_groups[0]["lr"]
    0.25
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, schedule: LargeBatchLR | None = None, **options: Any
    ) -> None:
        if schedule is not None and isinstance(options.get("min_lr", 0.0), (list, tuple)):
            raise bounds.HyperparameterError(
                f"min_lr must be one number with a schedule, got {options['min_lr']!r}"
            )
        self._schedule = schedule
        super().__init__(optimizer, **options)

    def step(self, metrics: Any, samples: float = 1.0, epoch: int | None = None) -> None:  # type: ignore[override]
        """Compare this epoch's metric with the best one.

        Args:
            metrics: This rank's mean: a number or a tensor of one element.
            samples: How many samples it is the mean of; equal on all ranks by default.
            epoch: As for torch.

        Raises:
            HyperparameterError: On every rank, where any rank's metric is not finite, or no rank has samples.
        """
        rows = gather([float(metrics), float(samples)], "plateau")
        for rank, (metric, weight) in enumerate(rows):
            if not math.isfinite(metric) or not (math.isfinite(weight) and weight >= 0):
                raise bounds.HyperparameterError(
                    "metrics must be finite and samples at least 0, "
                    f"got {metric} of {weight:g} samples on rank {rank}"
                )
        total = math.fsum(weight for _, weight in rows)
        bounds.more_than("samples over all ranks", total, 0)
        mean = math.fsum(metric * weight for metric, weight in rows) / total
        super().step(mean) if epoch is None else super().step(mean, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state, without the schedule, which has its own."""
        return {key: value for key, value in super().state_dict().items() if key != "_schedule"}

    def _reduce_lr(self, epoch: int) -> None:
        # torch has called this method since 1.0; tests/large_batch/test_plateau.py holds that it does.
        if self._schedule is None:
            super()._reduce_lr(epoch)  # type: ignore[misc]
        else:
            self._schedule.reduce(self.factor, min_lr=self.min_lrs[0])
