"""Tune's trainable: the base of the classes that `DistributedTrainableCreator` returns.

Runs in the trial's coordinator actor; its class methods run in the driver. Step 5 of 5 of a report's path:
`step()` returns it to Tune, and the next `step()` acknowledges it on the ranks.
"""

from __future__ import annotations

import logging
import os
import pickle
from typing import Any, ClassVar

import ray
from ray.tune import PlacementGroupFactory
from ray.tune.result import RESULT_DUPLICATE, SHOULD_CHECKPOINT
from ray.tune.trainable import FunctionTrainable

from horovod_tune.backend_choice import make_group, placement_of
from horovod_tune.coordinator.coordinator import Coordinator
from horovod_tune.coordinator.trial_storage import TrialStorage
from horovod_tune.errors import OutsideTune, SpecError, TrainingFailed, TrainingFunctionError
from horovod_tune.function.pickling import refuse_horovod_of_driver
from horovod_tune.function.shipping import ShippedFunction
from horovod_tune.function.training_function import RESOURCE_ARGUMENTS, check_config
from horovod_tune.messages import TrialRequest
from horovod_tune.ray_compat import queries
from horovod_tune.ray_compat.patches import (
    actors,
    driver_imports,
    failures,
    paused_trials,
    resized_trials,
    stored_state,
)
from horovod_tune.ray_compat.training_result import TrainingResult
from horovod_tune.spec.placement import fits
from horovod_tune.spec.resizing import request_for, resized, resized_request
from horovod_tune.spec.trial_spec import TrialSpec

logger = logging.getLogger(__name__)


class DistributedTrainable(FunctionTrainable):
    """A trial whose training function runs on several ranks.

    It is a FunctionTrainable, since the function decides when to report and to save. The function runs in
    the ranks' processes, not in this one, which is the trial's coordinator actor.
    """

    _spec: ClassVar[TrialSpec]
    _shipped: ClassVar[ShippedFunction]

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # tune.with_resources and tune.with_parameters return a subclass, which would have no effect.
        if "default_resource_request" in cls.__dict__:
            raise SpecError(
                f"tune.with_resources does not apply to a distributed trial. {RESOURCE_ARGUMENTS}"
            )
        if "setup" in cls.__dict__:
            raise TrainingFunctionError(
                "tune.with_parameters cannot bind objects to a distributed trial; bind them to its function: "
                "DistributedTrainableCreator(horovod_tune.with_parameters(train, ...), ...)"
            )

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> PlacementGroupFactory:
        """Return an empty bundle for the coordinator, and the training actors' bundles. Runs in the driver.

        Raises:
            ResourcesUnavailable: the cluster can never hold them.
            SpecError: ``config`` contains a dict that Tune cannot write.
            SerializationError: ``config`` holds a `DistributedOptimizer` of the driver.
        """
        # Under Ray Client, Tune does not run in the process that made this class.
        patch_tune()
        check_config(config)
        refuse_horovod_of_driver(config)
        placement = placement_of(cls._spec)
        queries.check_cluster_holds(placement)
        return request_for(placement)

    def setup(self, config: dict[str, Any]) -> None:
        name, group = type(self)._name, ray.util.get_current_placement_group()
        if self._storage is None or group is None:
            raise OutsideTune(
                f"{name} is a Tune trainable, which only Tune can start: tune.run({name}, config=...) or "
                f"tune.Tuner({name}, param_space=...).fit(). For one configuration, run a one-trial search."
            )
        if not self._spec.use_tpu:
            # ResourceChangingScheduler may have changed the resources of this trial.
            self._spec = resized(self._spec, group.bundle_specs)  # type: ignore[misc]
        self._node_id = ray.get_runtime_context().get_node_id()
        self._last_training_result: TrainingResult | None = None
        workers = make_group(self._spec, self._node_id)
        workers.world.create()
        self._function = ray.put(self._shipped.pickled())
        self._coordinator = Coordinator(workers)
        self._set_trial(config)

    def _set_trial(self, config: dict[str, Any]) -> None:
        self._has_reported_checkpoint = False
        # True if the next `step` ends this attempt, so that Tune restarts the trial on other nodes.
        self._restarts_elsewhere = False
        self._artifacts_are_stored = False
        storage = self._storage
        assert storage is not None, "Tune gives every trial its storage"
        request = TrialRequest(
            trial_id=self.trial_id,
            trial_name=self.trial_name,
            trial_dir=storage.trial_driver_staging_path,
            working_dir=storage.trial_working_directory,
            experiment_name=storage.experiment_dir_name,
            config=ray.cloudpickle.dumps(config),
            function=self._function,
            # Pickled: unpickling imports Ray Tune, which takes a second, so a rank does it only on request.
            resources=pickle.dumps(self.trial_resources),
            storage=ray.cloudpickle.dumps(storage),
            parameters=self._shipped.parameters(),
        )
        self._trial_storage = TrialStorage(storage, self._node_id)
        self._coordinator.set_trial(request, self._trial_storage)

    def step(self) -> dict[str, Any]:
        """Return rank 0's next report; after the last one, a result marked as duplicate."""
        if self._restarts_elsewhere:
            self._coordinator.close()
            raise queries.HostPreempted(
                "preempted: the trial's node is draining; the trial restarts on another node"
            )
        try:
            result = self._coordinator.next_result()
        except TrainingFailed as failed:
            if queries.is_preempted(failed.lost_nodes):
                # Tune must not count it as a failure if the cloud took a machine away.
                raise queries.HostPreempted(f"preempted: {failed}") from failed
            raise
        if result is None:
            self._store_artifacts()
            self._artifacts_are_stored = True
            return {RESULT_DUPLICATE: True, SHOULD_CHECKPOINT: False}
        metrics, checkpoint = result
        self._has_reported_checkpoint = self._has_reported_checkpoint or checkpoint is not None
        if self._coordinator.must_restart_elsewhere(self._node_id):
            if checkpoint is None and not self._has_reported_checkpoint:
                checkpoint = self._coordinator.store_commit(metrics)
            # Not now: Tune has to record the checkpoint first.
            self._restarts_elsewhere = checkpoint is not None and self._fits_elsewhere()
        self._last_training_result = TrainingResult(checkpoint=checkpoint, metrics=metrics)
        if checkpoint is not None:
            # Ray's own sessions add the name too; `analyze` finds the best checkpoint by it.
            name = os.path.basename(checkpoint.path)
            metrics = {**metrics, SHOULD_CHECKPOINT: True, "checkpoint_dir_name": name}
        return metrics

    def resize(self, resources: PlacementGroupFactory) -> bool:
        """Change the number of ranks to fit ``resources``, without a restart; return False if impossible.

        Possible only in elastic trials whose function calls `commit` or `get_state` or uses `hvd.elastic`,
        and not below the number of ranks that the trial started with.
        """
        if self._spec.num_hosts not in (None, 1):
            return False  # every host must have the same number of ranks
        spec = resized(self._spec, resources.bundles)
        if not self._coordinator.resize(spec.world_size, pickle.dumps(resources)):
            return False
        self._spec = spec  # type: ignore[misc]
        return True

    def _fits_elsewhere(self) -> bool:
        """Return True if the whole trial now fits on nodes that are not draining."""
        free = queries.free_on_remaining_nodes()
        for node in self._coordinator.nodes:
            for name, amount in self._spec.slot_resources.items():
                if node in free:
                    free[node][name] = free[node].get(name, 0.0) + amount
        return fits(placement_of(self._spec), list(free.values()))

    def log_result(self, result: dict[str, Any]) -> None:
        # Tune has added the iteration to this result; a restored trial continues counting from there.
        if self._last_training_result is not None:
            self._last_training_result.metrics = result

    def save(self, checkpoint_dir: str | None = None) -> TrainingResult:
        """Return the last result with its checkpoint; store the artifacts too if SyncConfig requests it."""
        assert self._storage is not None
        if self._storage.sync_config.sync_artifacts_on_checkpoint:
            self._store_artifacts()
        return super().save(checkpoint_dir)

    # Like FunctionTrainable's, `save_checkpoint` and `load_checkpoint` use a TrainingResult, not a directory.
    def save_checkpoint(self, checkpoint_dir: str = "") -> TrainingResult | None:  # type: ignore[override]
        """Return the last result; if the function only commits, with a checkpoint of the last commit."""
        last = self._last_training_result
        if last is not None and last.checkpoint is None and not self._has_reported_checkpoint:
            last.checkpoint = self._coordinator.store_commit(last.metrics)
        return last

    def restore(self, checkpoint_path: Any) -> None:
        """Start the trial from a checkpoint that this host or the driver's host can read."""
        result = checkpoint_path
        if isinstance(result, str):
            result = ray.tune.Checkpoint.from_directory(result)
        if isinstance(result, ray.tune.Checkpoint):
            result = TrainingResult(checkpoint=result, metrics={})
        # Tune opens the checkpoint on this host; the ranks' hosts fetch a copy if they cannot read it.
        self._restored_from = self._trial_storage.place(result.checkpoint)
        here = self._trial_storage.fetch(result.checkpoint)
        super().restore(TrainingResult(checkpoint=here, metrics=result.metrics))

    def load_checkpoint(self, checkpoint_result: TrainingResult) -> None:  # type: ignore[override]
        self._coordinator.restore(self._restored_from)

    def reset(self, *args: Any, **keywords: Any) -> bool:
        """End the trial, store its artifacts, and reset as Tune does."""
        try:
            os.getcwd()
        except FileNotFoundError:  # the trial's directory was removed
            os.chdir(os.environ.get("TUNE_ORIG_WORKING_DIR", "/"))
        # Before Tune's method, which replaces the storage with the next trial's.
        self._coordinator.end_trial()
        self._store_artifacts()  # not stored yet if the trial was stopped
        return super().reset(*args, **keywords)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Prepare for the next trial, whose ranks are new processes of the same workers."""
        self._last_training_result = None
        self._last_result: Any = {}
        self._set_trial(new_config)
        return True

    def cleanup(self) -> None:
        self._coordinator.close()
        self._store_artifacts()

    def _store_artifacts(self) -> None:
        """Store the files of the trial's working directory if SyncConfig(sync_artifacts=True).

        Tune itself does this for ordinary functions. A failure is logged and does not fail the trial.
        """
        if self._storage is None or self._artifacts_are_stored:
            return
        try:
            self._storage.persist_artifacts(force=True)
        except Exception as error:  # the storage may raise anything
            logger.warning("the trial's artifacts cannot be stored: %r", error)


def patch_tune() -> None:
    """Apply to this process the patches of Tune that distributed trials need; harmless if repeated."""
    driver_imports.log_without_torch()
    driver_imports.count_callbacks_without_imports()
    paused_trials.mend_paused_trials()
    actors.reuse_actors_of(is_distributed)
    actors.start_in_idle_processes(is_distributed)
    failures.explain_failures(is_distributed)
    failures.name_missing_metric(is_distributed)
    resized_trials.check_resized_trials(_placement_in, is_elastic)
    stored_state.replace_stored_files()


def is_distributed(trainable: Any) -> bool:
    """Return True if Tune's ``trainable`` was made by `DistributedTrainableCreator`."""
    return isinstance(trainable, type) and issubclass(trainable, DistributedTrainable)


def is_elastic(trainable: Any) -> bool:
    """Return True if Tune's ``trainable`` is a distributed one whose ranks may join and leave."""
    return is_distributed(trainable) and trainable._spec.is_elastic


def _placement_in(trainable: Any, resources: Any) -> Any:
    return resized_request(trainable._spec, resources) if is_distributed(trainable) else resources
