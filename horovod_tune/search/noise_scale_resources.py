"""Gives free workers to the trials whose gradient noise can use them; runs in the driver."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from horovod_tune.errors import MetricsError, SpecError
from horovod_tune.resizing import request_for, resized, with_workers
from horovod_tune.spec import TrialSpec

if TYPE_CHECKING:
    from ray.tune import PlacementGroupFactory


@dataclass(frozen=True)
class Demand:
    """What one trial has, and what it could use.

    Attributes:
        workers: how many ranks it has.
        batch_size: samples that one rank takes in a step.
        noise_scale: its gradient noise scale in samples; 0 where that is not known.
    """

    workers: int
    batch_size: float
    noise_scale: float

    def gain(self, more: int) -> float:
        r"""Return how much faster it learns with ``more`` ranks, as a share; 0 where its batch is enough.

        n ranks of b samples each learn at a rate of :math:`1 / (1 + B_{noise} / (n b))` a step (McCandlish
        et al. 2018, arXiv:1812.06162, equation 2.7).

        >>> Demand(workers=1, batch_size=32, noise_scale=32).gain(1)
        0.0
        >>> Demand(workers=1, batch_size=32, noise_scale=64).gain(1)  # from 1/3 to 1/2
        0.5
        """
        batch = self.workers * self.batch_size
        if not self.noise_scale > batch:
            return 0.0
        grown = batch + more * self.batch_size
        if math.isinf(self.noise_scale):
            return grown / batch - 1
        return (1 + self.noise_scale / batch) / (1 + self.noise_scale / grown) - 1


def share_out(
    demands: Mapping[str, Demand], *, free: int, step: int = 1, most: int | None = None
) -> dict[str, int]:
    """Return how many ranks each trial should have: free ones go, one after the other, where they gain most.

    No trial loses any. A trial whose global batch has reached its noise scale gets no more.

    Args:
        demands: the trials.
        free: ranks that nobody has.
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
        chosen = now[best]
        now[best] = Demand(chosen.workers + step, chosen.batch_size, chosen.noise_scale)
        free -= step
    return {name: each.workers for name, each in now.items()}


class DistributeByNoiseScale:
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
        if max_workers is not None and max_workers < 1:
            raise SpecError(f"max_workers must be at least 1, got {max_workers}")
        self.max_workers = max_workers
        self.noise_scale = noise_scale
        self.batch_size = batch_size
        # What trials have been given that is not theirs yet, since Tune changes them when they have paused.
        self._given: dict[str, int] = {}

    def __call__(
        self, tune_controller: Any, trial: Any, result: Mapping[str, Any], scheduler: Any
    ) -> PlacementGroupFactory | None:
        """Return the trial's new resources, or None where it keeps its own."""
        spec: TrialSpec | None = getattr(trial.get_trainable_cls(), "_spec", None)
        if spec is None:
            raise SpecError(f"DistributeByNoiseScale gives ranks to distributed trials only, got {trial}")
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
        noise = (result or {}).get(self.noise_scale)
        if noise is None or math.isnan(noise):
            return Demand(workers, 1.0, 0.0)
        batch = (result or {}).get(self.batch_size, trial.config.get(self.batch_size))
        if not isinstance(batch, (int, float)) or not batch > 0:
            raise MetricsError(
                f"DistributeByNoiseScale(batch_size={self.batch_size!r}) needs a metric or a hyperparameter "
                f"of that name with the samples of one rank in a step, got {batch!r} of trial {trial}"
            )
        return Demand(workers, float(batch), float(noise))
