"""The start of a world's training actors, in the trial's turn."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, TimeoutError
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horovod_tune import ray_adapter
from horovod_tune.errors import StartFailed
from horovod_tune.spec import TrialSpec
from horovod_tune.workers import forkserver
from horovod_tune.workers.gloo.actor import METHODS_AT_ONCE, TrainingActor
from horovod_tune.workers.turns import TURN_S, Turn, draw, starts_turn


class RankStart:
    """Starts ``spec.world_size`` training actors in ``placement_group`` as soon as it is the trial's turn.

    The turn ends when all of them have their imports, or have failed at them.
    """

    def __init__(self, spec: TrialSpec, placement_group: PlacementGroup) -> None:
        self._spec = spec
        self._group = placement_group
        self._directory = directory = ray_adapter.private_directory()
        ranks_here = spec.world_size if spec.num_hosts is None else spec.num_slots
        assert ranks_here is not None
        self._turn = starts_turn(directory, ranks_here).ask() if directory is not None else None
        self._members: Future[list[Any]] = Future()
        # In a thread of its own: meanwhile the coordinator imports, and Tune takes it for a trial that runs.
        threading.Thread(target=self._run, name="rank-start", daemon=True).start()

    @property
    def placement_group_id(self) -> str:
        return self._group.id.hex()

    def has_its_turn_within(self, timeout_s: float) -> bool:
        """Whether the actors may be started now, or within ``timeout_s``."""
        return self._turn is None or self._turn.comes_within(timeout_s)

    def members(self) -> list[Any]:
        """Return the actors' handles, when it is their turn (``TURN_S`` at the latest).

        Raises:
            StartFailed: Ray did not take the order within ``spec.timeout_s`` more.
        """
        try:
            return self._members.result(TURN_S + self._spec.timeout_s)
        except TimeoutError as error:
            if not self._members.done():
                raise StartFailed(
                    f"Ray took no order for training actors within {self._spec.timeout_s:g} s of their turn"
                ) from error
            raise

    def _run(self) -> None:
        try:
            environments = environments_of(self._spec, self._group, self._directory)
            if self._turn is not None:
                self._turn.comes_within(TURN_S)
            members = _create(self._spec, self._group, environments)
            if self._turn is not None:
                _end_when_loaded(self._turn, members)
            self._members.set_result(members)
        except Exception as error:  # whatever it is, `members` raises it in the coordinator's own thread
            if self._turn is not None:
                self._turn.end()
            self._members.set_exception(error)


def environments_of(
    spec: TrialSpec, placement_group: PlacementGroup, directory: Path | None
) -> list[dict[str, str] | None]:
    """Return the runtime environment of each bundle's ranks: on this host they are forked, in general.

    Ranks on other hosts start as Ray does it, since Python may be in another place there.
    """
    context = ray.get_runtime_context()
    bundles = len(placement_group.bundle_specs)
    forked = forkserver.runtime_env(spec, directory, context.runtime_env) if directory is not None else None
    if directory is None or forked is None:
        return [None] * bundles
    workers = ray_adapter.environment_of_workers()
    if workers is not None and draw(directory, f"fork_server_{context.get_job_id()}") == 0:
        forkserver.start(spec, directory, *workers)
    nodes = ray.util.placement_group_table(placement_group)["bundles_to_node_id"]
    here = context.get_node_id()
    return [forked if nodes[bundle] == here else None for bundle in range(bundles)]


def _create(
    spec: TrialSpec, placement_group: PlacementGroup, environments: Sequence[dict[str, str] | None]
) -> list[Any]:
    per_bundle = spec.num_slots if spec.num_hosts is not None else 1
    assert per_bundle is not None
    return [
        create_actor(spec, placement_group, index // per_bundle, environments[index // per_bundle])
        for index in range(spec.world_size)
    ]


def create_actor(
    spec: TrialSpec, placement_group: PlacementGroup, bundle: int, environment: dict[str, str] | None = None
) -> Any:
    """Create one training actor in a bundle; Ray starts it when the bundle has its resources."""
    return (
        ray.remote(TrainingActor)
        .options(
            num_cpus=spec.num_cpus_per_slot,
            num_gpus=1 if spec.use_gpu else 0,
            max_concurrency=METHODS_AT_ONCE,
            max_restarts=0,
            runtime_env=environment,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group, placement_group_bundle_index=bundle
            ),
        )
        .remote()
    )


def _end_when_loaded(turn: Turn, members: list[Any]) -> None:
    missing = len(members)

    def loaded(_: Any) -> None:  # Ray calls back in one thread; a member that died has an answer too
        nonlocal missing
        missing -= 1
        if not missing:
            turn.end()

    for member in members:
        member.load.remote().future().add_done_callback(loaded)
