"""Runs in the coordinator: starts a TPU trial's host actors, sends their plans, waits for their ranks."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horovod_tune import errors as error_text
from horovod_tune.actors.rank_backend import RankBackend
from horovod_tune.actors.training_actor import METHODS_AT_ONCE
from horovod_tune.backends.torch_xla import topology
from horovod_tune.backends.torch_xla.host_actor import LAUNCH_TIMEOUT_S, HostActor
from horovod_tune.backends.torch_xla.topology import LaunchPlan
from horovod_tune.backends.torch_xla.torch_xla_runtime import TorchXla
from horovod_tune.channel.report_channel import CoordinatorChannel
from horovod_tune.errors import BackendMissing, StartFailed
from horovod_tune.messages import Assignment, RankInfo, WorkerInfo
from horovod_tune.spec.placement import Placement
from horovod_tune.spec.trial_spec import TrialSpec
from horovod_tune.tpu import reservation
from horovod_tune.tpu.reservation import Reservation

# How often the heartbeat of a host actor is checked while its ranks start.
HEARTBEAT_S = 5.0


def require_installed() -> None:
    """Raise BackendMissing, with the cure, if torch_xla is not installed. This does not import it."""
    if importlib.util.find_spec("torch_xla") is None:
        raise BackendMissing("torch_xla is not installed. Run `pip install 'horovod_tune[tpu]'`.")


def placement(spec: TrialSpec) -> Placement:
    """Return the bundles of a TPU trial on the cluster as it is now. Runs in the driver."""
    if os.environ.get("PJRT_DEVICE") == "CPU":
        return topology.cpu_placement(spec)
    return reservation.placement(spec)


class XlaLauncher:
    """Starts one host actor on each host of a trial; for each trial, `assign` starts new ranks there.

    ``placement_group`` has a bundle for a host, or for the first host of a slice; its resources determine
    torch_xla's device.
    """

    # Tests replace both.
    actor_class: type = HostActor
    make_backend: Callable[[], RankBackend] = TorchXla

    def __init__(self, spec: TrialSpec, placement_group: PlacementGroup, *, node_id: str) -> None:
        self._spec = spec
        self._node_id = node_id
        self._reservation = Reservation(spec, placement_group)
        self._below: list[WorkerInfo] = []

    def channels(self) -> dict[int, CoordinatorChannel]:
        return {}  # ranks send to their host actor, which passes messages on through Ray

    def create(self) -> list[Any]:
        return [self._create_actor(group, index) for group, index in self._reservation.bundles()]

    def _create_actor(self, group: PlacementGroup, index: int) -> Any:
        resources = dict(group.bundle_specs[index])
        actor_class: Any = ray.remote(self.actor_class).options(
            num_cpus=resources.pop("CPU", 0),
            resources=resources,
            max_concurrency=METHODS_AT_ONCE,
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
        )
        spec = self._spec
        return actor_class.remote(self.make_backend, spec.preload, spec.timeout_s, spec.stall_timeout_s)

    def assign(self, actors: Sequence[Any], infos: Sequence[WorkerInfo]) -> list[Assignment]:
        """Start every host's ranks and wait until they are up; the first host that fails ends the wait."""
        rank_infos: dict[int, list[RankInfo]] = {}
        self._below = []
        end = time.monotonic() + LAUNCH_TIMEOUT_S
        timeout_s = self._spec.timeout_s
        starting = {actors[i].launch.remote(plan): i for i, plan in enumerate(self._plans(infos))}
        while starting:
            replies, _ = ray.wait(list(starting), timeout=HEARTBEAT_S)
            for reply in replies:
                i = starting.pop(reply)
                info = infos[i]
                try:
                    rank_infos[i], processes = ray.get(reply)
                except RayTaskError as error:
                    raise StartFailed(f"the ranks of {info.host} did not start:\n{error.cause}") from error
                except RayActorError as error:
                    why = error_text.death_text(error)
                    raise StartFailed(f"the host actor of {info.host} died: {why}") from error
                self._below += [replace(info, pid=pid, process_started=since) for pid, since in processes]
            heartbeats = {actors[i].describe.remote(): i for i in starting.values()}
            _, late = ray.wait(list(heartbeats), num_returns=len(heartbeats), timeout=timeout_s)
            if late:
                hosts = ", ".join(infos[heartbeats[each]].host for each in late)
                why = f"no heartbeat for {timeout_s:g} s (timeout_s) while its ranks started"
                raise StartFailed(f"the host actor of {hosts} stopped responding: {why}")
            if starting and time.monotonic() > end:
                hosts = ", ".join(infos[i].host for i in starting.values())
                raise StartFailed(f"the ranks of {hosts} did not start within {LAUNCH_TIMEOUT_S:g} s")
        in_order = [rank_infos[i] for i in range(len(actors))]
        return topology.assignments_of(in_order, num_slots=self._spec.num_slots)

    def _plans(self, infos: Sequence[WorkerInfo]) -> list[LaunchPlan]:
        if not self._reservation.chips_per_host:
            return [LaunchPlan(environment={"PJRT_DEVICE": "CPU"})]
        return topology.plans_of(self._reservation.find_chips(infos), len(infos))

    def processes_below(self) -> list[WorkerInfo]:
        # One that outlived its actor would keep the chip locked.
        return self._below

    def close(self) -> None:
        self._below = []
        self._reservation.close()


# As `backend_choice.py` calls it.
launcher = XlaLauncher
