"""Selects the parts of the backend (Horovod, torch.distributed, torch_xla) that a trial needs."""

from __future__ import annotations

from typing import Any

import ray

from horovod_tune.backends.horovod import horovod_backend
from horovod_tune.backends.torch_distributed import torch_backend
from horovod_tune.backends.torch_xla import xla_launcher
from horovod_tune.coordinator.policy import Limits
from horovod_tune.coordinator.worker_group import WorkerGroup
from horovod_tune.spec.trial_spec import TrialSpec
from horovod_tune.tpu import reservation

# By `TrialSpec.backend_name`.
_BACKENDS: dict[str, Any] = {"horovod": horovod_backend, "torch": torch_backend, "xla": xla_launcher}


def require_installed(spec: TrialSpec) -> None:
    """Raise BackendMissing if the backend's packages are not installed."""
    _BACKENDS[spec.backend_name].require_installed()
    if spec.backend_name == "torch" and spec.use_tpu:
        torch_backend.require_torch_tpu()


def placement_of(spec: TrialSpec) -> Any:
    """Return the `Placement` of a trial's workers."""
    if spec.backend_name == "xla":
        return xla_launcher.placement(spec)
    return reservation.placement(spec) if spec.use_tpu else spec.placement()


def make_launcher(spec: TrialSpec, placement_group: Any, node_id: str) -> Any:
    """Return the `Launcher` of a trial's workers in ``placement_group``."""
    return _BACKENDS[spec.backend_name].launcher(spec, placement_group, node_id=node_id)


def make_group(spec: TrialSpec, node_id: str) -> WorkerGroup:
    """Return the workers, not started yet, of the trial in whose placement group this process runs."""
    limits = Limits(spec.timeout_s)
    if spec.min_workers is not None:
        limits = Limits(spec.timeout_s, spec.min_workers, spec.most_workers, spec.min_workers_timeout_s)
    group = ray.util.get_current_placement_group()
    assert group is not None, "Tune runs a trial in its placement group"
    return WorkerGroup(make_launcher(spec, group, node_id), limits)
