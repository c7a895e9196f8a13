"""Gives free workers to the trials whose batches can use them; runs in the driver."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import ray

from horovod_tune.errors import MetricsError, SpecError
from horovod_tune.spec.resizing import request_for, resized, with_workers
from horovod_tune.spec.trial_spec import TrialSpec

if TYPE_CHECKING:
    from ray.tune import PlacementGroupFactory


@dataclass(frozen=True)
class Demand:
    """The workers of one trial, and what limits the use of more.

    Attributes:
        workers: how many ranks it has.
        batch_size: samples that one rank takes at a time.
        noise_scale: its gradient noise scale in samples, where its global batch grows with the ranks; 0
            where that is not known.
        global_batch_size: samples of an optimiser step, whatever the ranks, which share them; None if the
            global batch grows with the ranks.
    """

    workers: int
    batch_size: float
    noise_scale: float = 0.0
    global_batch_size: float | None = None

    def gain(self, more: int) -> float:
        r"""Return how much faster it learns with ``more`` ranks, as a share; 0 if it cannot use them.

        n ranks of b samples each learn at a rate of :math:`1 / (1 + B_{noise} / (n b))` a step (McCandlish
        et al. 2018, arXiv:1812.06162, equation 2.7). With a global batch that stays, a step is as much
        shorter as more of it is computed at a time.

        >>> Demand(workers=1, batch_size=32, noise_scale=32).gain(1)
        0.0
        >>> Demand(workers=1, batch_size=32, noise_scale=64).gain(1)  # from 1/3 to 1/2
        0.5
        >>> [Demand(workers, 32, global_batch_size=80).gain(1) for workers in (1, 2, 3)]
        [1.0, 0.25, 0.0]
        """
        batch = self.workers * self.batch_size
        grown = batch + more * self.batch_size
        if self.global_batch_size is not None:
            return max(min(grown, self.global_batch_size) / batch - 1, 0.0)
        if not self.noise_scale > batch:
            return 0.0
        if math.isinf(self.noise_scale):
            return grown / batch - 1
        return (1 + self.noise_scale / batch) / (1 + self.noise_scale / grown) - 1


def share_out(
    demands: Mapping[str, Demand], *, free: int, step: int = 1, most: int | None = None
) -> dict[str, int]:
    """Return how many ranks each trial should have: free ones go, one after the other, where they gain most.

    No trial loses any. A trial that gains nothing gets no more.

    Args:
        demands: the trials.
        free: ranks that no trial has.
        step: how many ranks a trial gets at a time.
        most: the most ranks of a trial.

    >>> noisy, quiet = Demand(1, 32, 1000.0), Demand(1, 32, 20.0)
    >>> share_out({"noisy": noisy, "quiet": quiet}, free=2)
    {'noisy': 3, 'quiet': 1}
    """
    now = dict(demands)
    while free >= step:
        gains = {
            name: each.gain(step) for name, each in now.items() if most is None or each.workers + step <= most
        }
        best = max(gains, key=lambda name: gains[name], default=None)
        if best is None or gains[best] <= 0:
            break
        now[best] = replace(now[best], workers=now[best].workers + step)
        free -= step
    return {name: each.workers for name, each in now.items()}


class _FreeWorkers(ABC):
    """Allocation function of Tune's ``ResourceChangingScheduler`` that shares out workers by `Demand`."""

    def __init__(self, *, max_workers: int | None, batch_size: str) -> None:
        if max_workers is not None and max_workers < 1:
            raise SpecError(f"max_workers must be at least 1, got {max_workers}")
        self.max_workers = max_workers
        self.batch_size = batch_size
        # What trials have been given that is not theirs yet, since Tune changes them when they have paused.
        self._given: dict[str, int] = {}

    def __call__(
        self, tune_controller: Any, trial: Any, result: Mapping[str, Any], scheduler: Any
    ) -> PlacementGroupFactory | None:
        """Return the trial's new resources, or None if it keeps its own."""
        spec: TrialSpec | None = getattr(trial.get_trainable_cls(), "_spec", None)
        if spec is None:
            raise SpecError(f"{type(self).__name__} gives ranks to distributed trials only, got {trial}")
        demands = {
            each.trial_id: self._demand(each, spec, result if each is trial else each.last_result)
            for each in {*tune_controller.get_live_trials(), trial}
        }
        cluster = ray.cluster_resources()
        room = min(int(cluster.get(name, 0) / each + 1e-6) for name, each in spec.slot_resources.items())
        bounds = [each for each in (self.max_workers, spec.max_workers) if each is not None]
        workers = share_out(
            demands,
            free=room - sum(each.workers for each in demands.values()),
            step=spec.num_hosts or 1,
            most=min(bounds, default=None),
        )[trial.trial_id]
        if workers == demands[trial.trial_id].workers:
            return None
        self._given[trial.trial_id] = workers
        return request_for(with_workers(spec, workers).placement())

    def _demand(self, trial: Any, spec: TrialSpec, result: Mapping[str, Any] | None) -> Demand:
        held = resized(spec, trial.placement_group_factory.bundles).world_size
        workers = max(held, self._given.get(trial.trial_id, 0))
        use = self._use(result or {})
        if not use:
            return Demand(workers, 1.0)
        batch = (result or {}).get(self.batch_size, trial.config.get(self.batch_size))
        if not isinstance(batch, (int, float)) or not batch > 0:
            raise MetricsError(
                f"{type(self).__name__}(batch_size={self.batch_size!r}) needs a metric or a hyperparameter "
                f"of that name with the samples that one rank takes at a time, got {batch!r} of trial {trial}"
            )
        return Demand(workers, float(batch), **use)

    @abstractmethod
    def _use(self, result: Mapping[str, Any]) -> dict[str, float]:
        """Return the fields of `Demand` that a result has; empty if it has none."""


class DistributeByNoiseScale(_FreeWorkers):
    """Allocation function of Tune's ``ResourceChangingScheduler``: free workers go where they help most.

    A batch far below the gradient noise scale gains by its size, one above it hardly does. Trials report
    their noise scale (`large_batch.NoiseScale`, or any number of samples), and those whose global batch is
    below it grow as others end. No trial loses workers to another.

    It is meant for functions whose ranks keep their batch when there are more of them, so that the global
    batch grows.

    Args:
        max_workers: the most ranks of a trial (default: as many as fit).
        noise_scale: the metric with the noise scale. The default is the lower end of its interval, which
            `large_batch` reports, so that a trial grows when it surely can use that.
        batch_size: the metric, or the hyperparameter, with the samples that one rank takes in a step.

    Example:
        >>> from ray.tune.schedulers import ASHAScheduler, ResourceChangingScheduler
        >>> scheduler = ResourceChangingScheduler(ASHAScheduler(max_t=30), DistributeByNoiseScale())
    """

    def __init__(
        self,
        *,
        max_workers: int | None = None,
        noise_scale: str = "noise_scale_low",
        batch_size: str = "batch_size",
    ) -> None:
        super().__init__(max_workers=max_workers, batch_size=batch_size)
        self.noise_scale = noise_scale

    def _use(self, result: Mapping[str, Any]) -> dict[str, float]:
        noise = result.get(self.noise_scale)
        return {} if noise is None or math.isnan(noise) else {"noise_scale": float(noise)}


class DistributeByGlobalBatch(_FreeWorkers):
    """Allocation function of Tune's ``ResourceChangingScheduler``: workers for global batches that grow.

    A trial whose global batch has grown (`large_batch.BatchGrowth`) works through it in more passes. Free
    workers go to such trials until each rank has one pass. No trial loses workers to another.

    It is meant for functions that keep their global batch in a world of any size, as
    ``large_batch.from_config(..., elastic=True)`` does with ``global_batch_size``. Without ``elastic``, a
    number of ranks that does not divide the batch is an error in the trial.

    Args:
        max_workers: the most ranks of a trial (default: as many as fit).
        global_batch_size: the metric with the global batch, one of ``setup.metrics()``.
        batch_size: the metric, or the hyperparameter, with the most samples that one rank takes in a pass.

    Example:
        >>> from ray.tune.schedulers import FIFOScheduler, ResourceChangingScheduler
        >>> scheduler = ResourceChangingScheduler(FIFOScheduler(), DistributeByGlobalBatch(max_workers=8))
    """

    def __init__(
        self,
        *,
        max_workers: int | None = None,
        global_batch_size: str = "global_batch_size",
        batch_size: str = "max_micro_batch_size",
    ) -> None:
        super().__init__(max_workers=max_workers, batch_size=batch_size)
        self.global_batch_size = global_batch_size

    def _use(self, result: Mapping[str, Any]) -> dict[str, float]:
        size = result.get(self.global_batch_size)
        return {} if size is None else {"global_batch_size": float(size)}
