"""The trial, as Tune sees it: `DistributedTrainableCreator` and the class that it returns."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import re
import uuid
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import ray
from ray.tune import PlacementGroupFactory
from ray.tune.result import RESULT_DUPLICATE, SHOULD_CHECKPOINT
from ray.tune.trainable import FunctionTrainable

from horovod_tune import ray_adapter
from horovod_tune.coordinator.coordinator import Coordinator
from horovod_tune.coordinator.elastic_group import ElasticGroup
from horovod_tune.coordinator.trial_storage import TrialStorage
from horovod_tune.coordinator.worker_group import WorkerGroup
from horovod_tune.errors import OutsideTune, PreflightFailed, SpecError, TrainingFailed, TrainingFunctionError
from horovod_tune.function.shipping import ShippedFunction
from horovod_tune.function.training_function import RESOURCE_ARGUMENTS, check_training_function, function_name
from horovod_tune.gloo import backend as gloo_backend
from horovod_tune.gloo.early_start import EarlyRanks
from horovod_tune.messages import TrialOrder
from horovod_tune.ray_adapter.training_result import TrainingResult
from horovod_tune.run_settings import settings_for
from horovod_tune.spec import (
    DEFAULT_STALL_TIMEOUT_S,
    DEFAULT_TIMEOUT_S,
    TrialSpec,
    check_fits,
    fits_one_node,
    make_spec,
)
from horovod_tune.with_parameters import ShippedParameters, parameters_of
from horovod_tune.xla import backend as xla_backend

logger = logging.getLogger(__name__)

# Which trainables' machines have been looked at, on which cluster.
_preflighted: set[tuple[str, str]] = set()


class DistributedTrainable(FunctionTrainable):
    """A trial whose training function runs on several ranks; made by `DistributedTrainableCreator`.

    A FunctionTrainable to Tune, since the function decides when to report and to save, but its function
    runs in the training actors and not in this process, which is the trial's coordinator actor.
    """

    _spec: ClassVar[TrialSpec]
    _shipped: ClassVar[ShippedFunction]
    _parameters: ClassVar[ShippedParameters | None]

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        # Two functions of Tune's return a subclass; it would run as if nobody had asked for anything.
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
        """Return an empty bundle for the coordinator and those of the training actors.

        Raises:
            ResourcesUnavailable: the cluster can never hold them. Runs in the driver.
            PreflightFailed: the trial spans machines of which one cannot take part.
        """
        # Under Ray Client, Tune runs in another process than the one that made this class.
        _patch_tune(cls._spec.reuse_workers)
        placement = cls._placement()
        if ray.is_initialized():
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            if not ray_adapter.cluster_can_grow():
                check_fits(placement, nodes)
            # Machines that are still to come are looked at before the first trial that finds them there.
            enough = len(nodes) >= (cls._spec.num_hosts or 1)
            if enough and len(placement.bundles) > 1 and not fits_one_node(placement, nodes):
                cls._look_at_the_machines()
        return PlacementGroupFactory(
            [{}, *[dict(bundle) for bundle in placement.bundles]], strategy=placement.strategy
        )

    @classmethod
    def _look_at_the_machines(cls) -> None:
        """Look at every machine once, before the first trial that spans several of them."""
        key = (cls._shipped.token, ray.get_runtime_context().gcs_address)
        if key in _preflighted:
            return
        from horovod_tune import preflight

        report = preflight.check(
            cls._shipped.modules(),
            num_hosts=cls._spec.num_hosts or 2,
            nics=cls._spec.nics,
            use_tpu=cls._spec.use_tpu,
        )
        if not report.ok:
            raise PreflightFailed(f"a trial on several machines cannot run here:\n{report}")
        if report.problems:
            logger.warning("Preflight:\n%s", report)
        _preflighted.add(key)

    @classmethod
    def _placement(cls) -> Any:
        if cls._spec.use_tpu:
            from horovod_tune.xla.launcher import placement

            return placement(cls._spec)
        return cls._spec.placement()

    def setup(self, config: dict[str, Any]) -> None:
        EarlyRanks.imports_are_done()
        name = type(self)._name
        if self._storage is None or ray.util.get_current_placement_group() is None:
            raise OutsideTune(
                f"{name} is a Tune trainable, which only Tune can start: tune.run({name}, config=...) or "
                f"tune.Tuner({name}, param_space=...).fit(). One configuration is a search of one trial."
            )
        # "Consider setting reuse_actors=True": they are reused.
        logging.getLogger("ray.tune.trainable.trainable").addFilter(
            lambda record: "reuse_actors" not in record.getMessage()
        )
        self._node_id = ray.get_runtime_context().get_node_id()
        self._last_training_result: TrainingResult | None = None
        self._coordinator = Coordinator(
            self._make_group(),
            self._shipped.pickled(),
            reuse_workers=self._spec.reuse_workers,
        )
        if self._spec.use_tpu:  # otherwise EarlyRanks has begun
            self._coordinator.begin_workers()
        self._set_trial(config)
        self._trial_storage.begin()

    def _make_group(self) -> WorkerGroup:
        spec, launcher = self._spec, self._make_launcher()
        if not spec.is_elastic:
            return WorkerGroup(launcher, timeout_s=spec.timeout_s)
        assert spec.min_workers is not None and spec.max_workers is not None
        return ElasticGroup(
            launcher,
            timeout_s=spec.timeout_s,
            min_workers=spec.min_workers,
            max_workers=spec.max_workers,
            wait_s=spec.min_workers_timeout_s,
        )

    def _make_launcher(self) -> Any:
        group = ray.util.get_current_placement_group()
        assert group is not None, "Tune runs a trial in its placement group"
        if self._spec.use_tpu:
            from horovod_tune.xla.launcher import XlaLauncher

            return XlaLauncher(self._spec, group, node_id=self._node_id)
        from horovod_tune.gloo.launcher import GlooLauncher

        return GlooLauncher(self._spec, group, node_id=self._node_id)

    def _set_trial(self, config: dict[str, Any]) -> None:
        storage = self._storage
        assert storage is not None, "Tune gives every trial its storage"
        order = TrialOrder(
            trial_id=self.trial_id,
            trial_name=self.trial_name,
            trial_dir=storage.trial_driver_staging_path,
            working_dir=storage.trial_working_directory,
            experiment_name=storage.experiment_dir_name,
            config=copy.deepcopy(config),
            function=None,
            # Closed: to open it, a rank would import Ray Tune before torch, a second that few functions need.
            resources=pickle.dumps(self.trial_resources),
            parameters=self._parameters.reference() if self._parameters is not None else None,
        )
        self._trial_storage = TrialStorage(storage, self._node_id)
        self._coordinator.set_trial(order, self._trial_storage)

    def step(self) -> dict[str, Any]:
        """Return rank 0's next report, as Tune's own function trainables do (see FunctionTrainable.step)."""
        try:
            result = self._coordinator.next_result()
        except TrainingFailed as failed:
            if ray_adapter.is_preempted(failed.lost_nodes):
                from horovod_tune.ray_adapter.preemption import HostPreempted

                # A machine that its cloud took away is no failure of the trial: Tune must not count it.
                raise HostPreempted(f"pre-empted: {failed}") from failed
            raise
        if result is None:
            return {RESULT_DUPLICATE: True, SHOULD_CHECKPOINT: False}
        metrics, checkpoint = result
        self._last_training_result = TrainingResult(checkpoint=checkpoint, metrics=metrics)
        if checkpoint is not None:
            metrics = {**metrics, SHOULD_CHECKPOINT: True}
        return metrics

    def log_result(self, result: dict[str, Any]) -> None:
        # `step` does not know the iteration yet; a restored trial counts on from the checkpoint's metrics.
        if self._last_training_result is not None:
            self._last_training_result.metrics = result

    # FunctionTrainable uses these two in its own way too: with a result in place of a directory.
    def save_checkpoint(self, checkpoint_dir: str = "") -> TrainingResult | None:  # type: ignore[override]
        return self._last_training_result

    def restore(self, checkpoint_path: Any) -> None:
        """Let the trial start from a checkpoint that this host, or else the driver's, can read."""
        result = checkpoint_path
        if isinstance(result, str):
            result = ray.tune.Checkpoint.from_directory(result)
        if isinstance(result, ray.tune.Checkpoint):
            result = TrainingResult(checkpoint=result, metrics={})
        # Tune looks at it here; each host of the ranks brings it from where it lies, if it has to.
        self._restored_from = self._trial_storage.place(result.checkpoint)
        here = self._trial_storage.bring_here(result.checkpoint)
        super().restore(TrainingResult(checkpoint=here, metrics=result.metrics))

    def load_checkpoint(self, checkpoint_result: TrainingResult) -> None:  # type: ignore[override]
        self._coordinator.restore(self._restored_from)

    def reset(self, *args: Any, **keywords: Any) -> bool:
        """Take the next trial, also where this process is in a directory that the one before has removed."""
        try:
            os.getcwd()
        except FileNotFoundError:
            os.chdir(os.environ.get("TUNE_ORIG_WORKING_DIR", "/"))
        return super().reset(*args, **keywords)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Take the next trial on the same workers, or on new ones where these are not fit for it."""
        self._coordinator.end_trial()
        if self._coordinator.replaced_because:
            logger.info(
                "horovod_tune replaced the workers before trial %s: %s",
                self.trial_id,
                "; ".join(self._coordinator.replaced_because),
            )
        self._last_training_result = None
        self._last_result: Any = {}
        self._set_trial(new_config)
        return True

    def cleanup(self) -> None:
        self._coordinator.close()


def DistributedTrainableCreator(
    func: Callable[[dict[str, Any]], Any],
    use_gpu: bool = False,
    num_hosts: int | None = None,
    num_slots: int | None = None,
    num_cpus_per_slot: float | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    replicate_pem: bool = False,
    *,
    num_workers: int | None = None,
    num_cpus_per_worker: float | None = None,
    use_tpu: bool = False,
    tpu_type: str | None = None,
    stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
    reuse_workers: bool = True,
    nics: str | Sequence[str] | None = None,
    min_workers: int | None = None,
    max_workers: int | None = None,
    min_workers_timeout_s: float = DEFAULT_TIMEOUT_S,
) -> type[DistributedTrainable]:
    """Turn a Horovod training function into a class that ``tune.run`` and ``tune.Tuner`` take.

    Nothing starts here. Each trial then has one coordinator actor, which takes no CPU, and
    ``num_hosts * num_slots`` training actors, each of which runs ``func(config)`` as one Horovod rank.

    Args:
        func: the training function. It takes ``config``, calls ``hvd.init()``, and reports with
            `horovod_tune.report` or ``ray.tune.report``.
        use_gpu: whether each rank holds one GPU; ``torch.cuda.set_device(hvd.local_rank())`` selects it.
        num_hosts: on how many different machines a trial runs (default 1).
        num_slots: ranks on each of them (default 1; with ``use_tpu``, all chips of a host).
        num_cpus_per_slot: CPUs that each rank holds (default 1).
        timeout_s: seconds of silence after which a rank counts as lost (default 60). It bounds each phase
            of the start too, with 0.25 s more for each training actor. It is not the time between reports:
            an epoch may take hours.
        replicate_pem: accepted for old scripts; no SSH key is needed any more.
        num_workers: instead of ``num_slots``: the total of ranks, placed as tightly as they fit when
            ``num_hosts`` is not given.
        num_cpus_per_worker: another name of ``num_cpus_per_slot``.
        use_tpu: run torch_xla processes on the chips of ``num_hosts`` TPU hosts in place of Horovod ranks.
            ``num_slots`` then counts chips.
        tpu_type: with ``use_tpu``, the type of slice that a trial takes, as Ray and Cloud TPU name it
            (``"v4-32"``); it says ``num_hosts`` too. Needed where the cluster has several types.
        stall_timeout_s: seconds (default 1800) after which a collective that not all ranks have entered is
            an error. With ``use_tpu``: seconds in which a host's ranks do nothing at all (no report, no
            operation of torch_xla's, no computation) while Tune waits for them.
        reuse_workers: keep the ranks' processes and their world for the next trial. Each trial still finds
            its process as a new one would be.
        nics: the network interface, or several in order of preference, for the ranks' collectives. Default:
            the loopback on one host, the one that has Ray's node address on several.
        min_workers: makes trials elastic. A trial goes on with as few ranks as these when others are lost,
            and starts with as few where neither ``num_slots`` nor ``num_workers`` is given. See `commit`.
        max_workers: up to how many ranks an elastic trial grows when there is room (default: as many as it
            starts with).
        min_workers_timeout_s: seconds for which fewer ranks than ``min_workers`` wait for others (default
            60).

    Raises:
        SpecError: an argument has the wrong type, is out of bounds, or contradicts another.
        TrainingFunctionError: ``func`` cannot be called as ``func(config)``.
        BackendMissing: Horovod (or torch_xla) is not installed, or built without Gloo.
    """
    check_training_function(func)
    if replicate_pem:
        warnings.warn("replicate_pem has no effect: ranks are started by Ray, without SSH", stacklevel=2)
    spec = make_spec(
        num_hosts=num_hosts,
        num_slots=num_slots,
        num_workers=num_workers,
        num_cpus_per_slot=num_cpus_per_slot,
        num_cpus_per_worker=num_cpus_per_worker,
        use_gpu=use_gpu,
        use_tpu=use_tpu,
        tpu_type=tpu_type,
        timeout_s=timeout_s,
        stall_timeout_s=stall_timeout_s,
        reuse_workers=reuse_workers,
        nics=nics,
        min_workers=min_workers,
        max_workers=max_workers,
        min_workers_timeout_s=min_workers_timeout_s,
    )
    (xla_backend if use_tpu else gloo_backend).require_installed()
    _patch_tune(reuse_workers)
    name = re.sub(r"\W", "_", function_name(func))
    shipped = ShippedFunction(func, uuid.uuid4().hex)
    body = {
        "_spec": spec,
        "_shipped": shipped,
        "_parameters": parameters_of(func),
        "_name": name,
        "__doc__": func.__doc__,
        "__module__": __name__,
    }
    metaclass: type = type(DistributedTrainable)
    if not use_tpu:
        metaclass = type("EarlyStart", (metaclass,), {"_early_ranks": EarlyRanks(spec, name)})
    return metaclass(name, (DistributedTrainable,), body)


def _patch_tune(reuse_workers: bool) -> None:
    """Change Tune in this process, once, where it must do something else for distributed trials."""
    ray_adapter.keep_longer_results()
    ray_adapter.end_waits_of_paused_trials()
    if reuse_workers:
        ray_adapter.reuse_actors_of(_wants_reuse)
    ray_adapter.start_in_idle_processes(_is_ours)
    ray_adapter.name_lost_hosts(_is_ours)
    ray_adapter.accept_trials_without_results()
    ray_adapter.count_each_death_once(_is_ours)
    ray_adapter.shorten_errors(_is_ours)


def _is_ours(trainable: type) -> bool:
    return isinstance(trainable, type) and issubclass(trainable, DistributedTrainable)


def _wants_reuse(trainable: type) -> bool:
    return issubclass(trainable, DistributedTrainable) and trainable._spec.reuse_workers


# Not when the factory is called: `tune.run(DistributedTrainableCreator(...))` looks up tune.run before that.
ray_adapter.prepare_runs(settings_for(_is_ours, _wants_reuse))
