"""Runs in the coordinator: creates a trial's training actors when its start slot comes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, TimeoutError, wait
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from horovod_tune import ray_compat
from horovod_tune.errors import StartFailed
from horovod_tune.gloo import fork_server
from horovod_tune.gloo.start_slots import SLOT_TIMEOUT_S, StartSlot, next_number, start_slot
from horovod_tune.gloo.training_actor import METHODS_AT_ONCE, TrainingActor
from horovod_tune.spec import START_S_PER_WORKER, TrialSpec, start_timeout_s


class RankStart:
    """Starts ``spec.world_size`` training actors in ``placement_group`` once the trial has its start slot.

    The slot is released when all of them have finished their imports, or failed.
    """

    def __init__(self, spec: TrialSpec, placement_group: PlacementGroup) -> None:
        self._spec = spec
        self._group = placement_group
        self._directory = directory = ray_compat.private_directory()
        ranks_here = spec.world_size if spec.num_hosts is None else max(spec.slots)
        self._slot = start_slot(directory, ranks_here).request() if directory is not None else None
        self._actors: Future[list[Any]] = Future()
        # In a thread, so that the coordinator can import meanwhile and Tune sees a running trial.
        threading.Thread(target=self._run, name="rank-start", daemon=True).start()

    @property
    def placement_group_id(self) -> str:
        return self._group.id.hex()

    def has_slot_within(self, timeout_s: float) -> bool:
        """Wait up to ``timeout_s`` for the start slot; return whether the trial holds it."""
        return self._slot is None or self._slot.wait(timeout_s)

    def wait(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` until Ray has been asked for the actors."""
        wait([self._actors], timeout_s)

    def actors(self) -> list[Any]:
        """Return the actors' handles, after at most ``SLOT_TIMEOUT_S`` of waiting for the start slot.

        Raises:
            StartFailed: Ray did not create the actors in the time that a start may take.
        """
        limit_s = start_timeout_s(self._spec.timeout_s, self._spec.world_size)
        try:
            return self._actors.result(SLOT_TIMEOUT_S + limit_s)
        except TimeoutError as error:
            if not self._actors.done():
                raise StartFailed(
                    f"could not create the {self._spec.world_size} training actors within {limit_s:g} s "
                    f"(timeout_s, and {START_S_PER_WORKER} s for each of them)"
                ) from error
            raise

    def _run(self) -> None:
        try:
            environments = environments_of(self._spec, self._group, self._directory)
            if self._slot is not None:
                self._slot.wait(SLOT_TIMEOUT_S)
            actors = _create(self._spec, self._group, environments)
            if self._slot is not None:
                _release_when_loaded(self._slot, actors)
            self._actors.set_result(actors)
        except Exception as error:  # whatever it is, `actors` raises it in the coordinator's own thread
            if self._slot is not None:
                self._slot.release()
            self._actors.set_exception(error)


def environments_of(
    spec: TrialSpec, placement_group: PlacementGroup, directory: Path | None
) -> list[dict[str, str] | None]:
    """Return the runtime environment of each bundle's ranks: they are forked, in general."""
    context = ray.get_runtime_context()
    bundles = len(placement_group.bundle_specs)
    if directory is None or fork_server.runtime_env(spec, directory, context.runtime_env) is None:
        return [None] * bundles
    workers = ray_compat.environment_of_workers()
    if workers is not None and next_number(directory, f"fork_server_{context.get_job_id()}") == 0:
        fork_server.start(spec, directory, *workers)
    nodes = ray.util.placement_group_table(placement_group)["bundles_to_node_id"]
    here = context.get_node_id()
    return [
        fork_server.runtime_env(spec, directory, context.runtime_env, elsewhere=nodes[bundle] != here)
        for bundle in range(bundles)
    ]


def environment_anywhere(spec: TrialSpec, directory: Path | None) -> dict[str, str] | None:
    """Return the runtime environment of a rank of which nobody knows yet where Ray places it."""
    if directory is None:
        return None
    inherited = ray.get_runtime_context().runtime_env
    return fork_server.runtime_env(spec, directory, inherited, elsewhere=True)


def _create(
    spec: TrialSpec, placement_group: PlacementGroup, environments: Sequence[dict[str, str] | None]
) -> list[Any]:
    return [
        create_actor(spec, placement_group, bundle, environments[bundle]) for bundle in bundle_of_places(spec)
    ]


def bundle_of_places(spec: TrialSpec) -> list[int]:
    """Return the index of each training actor's bundle."""
    return [bundle for bundle, count in enumerate(spec.slots) for _ in range(count)]


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


def _release_when_loaded(slot: StartSlot, actors: list[Any]) -> None:
    missing = len(actors)

    def loaded(_: Any) -> None:  # Ray calls back in one thread; a actor that died has an answer too
        nonlocal missing
        missing -= 1
        if not missing:
            slot.release()

    for actor in actors:
        actor.load.remote().future().add_done_callback(loaded)
