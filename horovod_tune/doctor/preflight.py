"""Runs in the driver: examines the nodes of a search whose trials span nodes, before its first trial."""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.tune import Callback

from horovod_tune.best_effort import best_effort_callback
from horovod_tune.doctor.nodes import check
from horovod_tune.errors import PreflightFailed, ResourcesUnavailable
from horovod_tune.function.shipping import ShippedFunction
from horovod_tune.ray_compat import queries
from horovod_tune.spec.placement import Placement, fits_one_node
from horovod_tune.spec.trial_spec import TrialSpec

logger = logging.getLogger(__name__)

# The training functions whose nodes have been examined, each with its cluster.
_examined: set[tuple[str, str]] = set()


@best_effort_callback("preflight", PreflightFailed, ResourcesUnavailable)
class Preflight(Callback):
    """Examines every node once, as soon as the cluster has enough nodes for a trial that does not fit one."""

    def __init__(self, spec: TrialSpec, shipped: ShippedFunction, placement: Placement) -> None:
        self._spec, self._shipped, self._placement = spec, shipped, placement

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        key = (self._shipped.token, ray.get_runtime_context().gcs_address)
        if key in _examined:
            return
        queries.check_cluster_holds(self._placement)
        nodes = queries.resources_of_nodes()
        # A cluster that grows may not have enough nodes yet.
        if len(nodes) < (self._spec.num_hosts or 1) or fits_one_node(self._placement, nodes):
            return
        report = check(self._shipped.modules(), nics=self._spec.nics, backend=self._spec.backend_name)
        if not report.ok:
            raise PreflightFailed(f"a trial on several machines cannot run here:\n{report}")
        if report.findings:
            logger.warning("Preflight:\n%s", report)
        _examined.add(key)
