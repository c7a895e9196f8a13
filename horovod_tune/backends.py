"""Joins a backend, Gloo or XLA, with the coordinator: what a trial needs of either."""

from __future__ import annotations

from typing import Any

import ray

from horovod_tune.coordinator.policy import Limits
from horovod_tune.coordinator.worker_group import WorkerGroup
from horovod_tune.gloo import gloo_backend
from horovod_tune.spec.trial_spec import TrialSpec
from horovod_tune.xla import xla_backend


def require_installed(*, use_tpu: bool) -> None:
    """Raise BackendMissing where no rank could start, with the cure."""
    (xla_backend if use_tpu else gloo_backend).require_installed()


def placement_of(spec: TrialSpec) -> Any:
    """Return the `Placement` of a trial's workers."""
    if spec.use_tpu:
        from horovod_tune.xla.xla_launcher import placement

        return placement(spec)
    return spec.placement()


def make_group(spec: TrialSpec, node_id: str) -> WorkerGroup:
    """Return the workers of the trial whose placement group this process is in; nothing starts yet."""
    limits = Limits(spec.timeout_s)
    if spec.min_workers is not None:
        limits = Limits(spec.timeout_s, spec.min_workers, spec.most_workers, spec.min_workers_timeout_s)
    return WorkerGroup(_make_launcher(spec, node_id), limits)


def _make_launcher(spec: TrialSpec, node_id: str) -> Any:
    group = ray.util.get_current_placement_group()
    assert group is not None, "Tune runs a trial in its placement group"
    if spec.use_tpu:
        from horovod_tune.xla.xla_launcher import XlaLauncher

        return XlaLauncher(spec, group, node_id=node_id)
    from horovod_tune.gloo.gloo_launcher import GlooLauncher

    return GlooLauncher(spec, group, node_id=node_id)
