"""Gives free workers to the trials whose batches can use them; runs in the driver."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ray
from ray.tune.experiment import Trial
from ray.tune.utils import flatten_dict

from horovod_tune.bounds import count
from horovod_tune.errors import MetricsError, SpecError
from horovod_tune.scoring import as_number, check_metric_name
from horovod_tune.spec.resizing import request_for, resized, with_workers

if TYPE_CHECKING:
    from ray.tune import PlacementGroupFactory


class _FreeWorkers(ABC):
    """Gives free workers to the trials that gain most; `names`: the metrics with a trial's need and batch."""

    def __init__(self, max_workers: int | None, **names: str) -> None:
        self._max_workers = (
            None if max_workers is None else count("max_workers", max_workers, error=SpecError)
        )
        for argument, name in names.items():
            check_metric_name(argument, name)
        self._metric, self._batch_size = names.values()
        # Workers given to trials that do not run with them yet; Tune resizes a trial only once it has paused.
        self._given: dict[str, int] = {}

    @abstractmethod
    def _gain(self, need: float, batch: float, grown: float) -> float:
        """Return a trial's relative gain if its ranks together take `grown` instead of `batch` samples."""

    def __call__(
        self, tune_controller: Any, trial: Any, result: Mapping[str, Any], scheduler: Any
    ) -> PlacementGroupFactory | None:
        """Return the trial's new resources, or None if it keeps its own."""
        spec = getattr(trial.get_trainable_cls(), "_spec", None)
        if spec is None:
            raise SpecError(f"{type(self).__name__} gives ranks to distributed trials only, got {trial}")
        workers: dict[str, int] = {}
        needs: dict[str, tuple[float, float]] = {}
        for each in {*tune_controller.get_live_trials(), trial}:
            held = resized(spec, each.placement_group_factory.bundles).world_size
            given = self._given.get(each.trial_id, 0)
            if each.status == Trial.RUNNING and held >= given:
                self._given.pop(each.trial_id, None)
            if each.status == Trial.PAUSED and each.trial_id not in self._given:
                continue  # it holds no workers
            workers[each.trial_id] = max(held, given)
            needs[each.trial_id] = self._need(each, (result if each is trial else each.last_result) or {})
        before = workers[trial.trial_id]
        cluster, step = ray.cluster_resources(), spec.num_hosts or 1
        room = min(int(cluster.get(name, 0) / each + 1e-6) for name, each in spec.slot_resources.items())
        most = min(each for each in (self._max_workers, spec.max_workers, math.inf) if each is not None)
        for _ in range((room - sum(workers.values())) // step):
            gains = {
                name: self._gain(needs[name][0], now * needs[name][1], (now + step) * needs[name][1])
                for name, now in workers.items()
                if now + step <= most
            }
            best = max(gains, key=lambda name: gains[name], default=None)
            if best is None or gains[best] <= 0:
                break
            workers[best] += step
        if workers[trial.trial_id] == before:
            return None
        self._given[trial.trial_id] = workers[trial.trial_id]
        return request_for(with_workers(spec, workers[trial.trial_id]).placement())

    def _need(self, trial: Any, result: Mapping[str, Any]) -> tuple[float, float]:
        """Return a trial's need, 0 if it is not known, and the samples that one of its ranks takes."""
        reported = flatten_dict(dict(result))
        need = as_number(reported.get(self._metric))
        if need is None or math.isnan(need):
            return 0.0, 1.0
        given = (flatten_dict(trial.config) | reported).get(self._batch_size)
        batch = as_number(given)
        if batch is None or not batch > 0:
            raise MetricsError(
                f"{type(self).__name__}(batch_size={self._batch_size!r}) needs a metric or a hyperparameter "
                f"of that name with the samples that one rank takes at a time, got {given!r} in trial {trial}"
            )
        return need, batch


class DistributeByNoiseScale(_FreeWorkers):
    r"""Allocation function of Tune's ``ResourceChangingScheduler``: free workers go where they help most.

    A step of n ranks with b samples each makes progress of :math:`1 / (1 + B_{noise} / (n b))` (McCandlish et
    al. 2018, arXiv:1812.06162, equation 2.7): a batch far below the gradient noise scale gains in proportion
    to its size, a batch above it hardly gains. Trials report their noise scale (`large_batch.NoiseScale`, or
    any number of samples). A trial whose global batch is below it gets workers as others end; none loses any.

    It is meant for functions whose ranks keep their batch size, so that the global batch grows with them.

    Args:
        max_workers: the most ranks of a trial, at least 1 (default: as many as fit).
        noise_scale: the metric with the noise scale. The default is the lower end of the interval that
            `large_batch` reports: a cautious estimate.
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
        super().__init__(max_workers, noise_scale=noise_scale, batch_size=batch_size)

    def _gain(self, need: float, batch: float, grown: float) -> float:
        noise = min(need, 1e300)
        return (1 + noise / batch) / (1 + noise / grown) - 1 if noise > batch else 0.0


class DistributeByGlobalBatch(_FreeWorkers):
    """Allocation function of Tune's ``ResourceChangingScheduler``: workers for global batches that grow.

    A trial whose global batch has grown (`large_batch.BatchGrowth`) works through it in more passes. Free
    workers go to these trials until each rank needs only one pass. No trial loses workers to another.

    It is meant for functions that keep their global batch with any number of ranks, as
    ``large_batch.from_config(..., elastic=True)`` does with ``global_batch_size``. Without ``elastic``, a
    number of ranks that does not divide the batch is an error in the trial.

    Args:
        max_workers: the most ranks of a trial, at least 1 (default: as many as fit).
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
        super().__init__(max_workers, global_batch_size=global_batch_size, batch_size=batch_size)

    def _gain(self, need: float, batch: float, grown: float) -> float:
        return min(grown, need) / batch - 1
