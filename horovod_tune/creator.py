"""Runs in the driver: `DistributedTrainableCreator`."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import uuid
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from horovod_tune.backend_choice import require_installed
from horovod_tune.errors import OutsideTune
from horovod_tune.function.shipping import ShippedFunction
from horovod_tune.function.training_function import check_training_function, function_name
from horovod_tune.ray_compat import queries
from horovod_tune.ray_compat.patches import tune_run
from horovod_tune.run_settings import prepare
from horovod_tune.session.session import RANK_VARIABLE
from horovod_tune.spec.trial_spec import DEFAULT_STALL_TIMEOUT_S, DEFAULT_TIMEOUT_S, make_spec
from horovod_tune.trainable import DistributedTrainable, patch_tune

# The variable that each launcher sets. `horovodrun --mpi` starts Open MPI's mpirun.
_LAUNCHERS = {
    "HOROVOD_SIZE": "horovodrun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "TORCHELASTIC_RUN_ID": "torchrun",
}


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
    backend: str | None = None,
    use_tpu: bool = False,
    tpu_type: str | None = None,
    stall_timeout_s: float = DEFAULT_STALL_TIMEOUT_S,
    preload: Sequence[str] = (),
    nics: str | Sequence[str] | None = None,
    min_workers: int | None = None,
    max_workers: int | None = None,
    min_workers_timeout_s: float = DEFAULT_TIMEOUT_S,
) -> type[DistributedTrainable]:
    """Turn a distributed training function into a Trainable for ``tune.run`` and ``tune.Tuner``.

    This call starts nothing. Each trial has one coordinator actor, which takes no CPU, and
    ``num_hosts * num_slots`` training actors, each of which starts a new process that runs ``func(config)``
    as one rank (with torch_xla, one actor per host, which starts all ranks of the host).

    Args:
        func: the training function. It takes ``config``, calls ``hvd.init()``, and reports with
            `horovod_tune.report` or ``ray.tune.report``.
        use_gpu: give each rank one GPU; ``torch.cuda.set_device(get_world().gpu)`` selects it.
        num_hosts: number of different hosts that a trial runs on (default 1).
        num_slots: ranks on each host (default 1; with ``use_tpu``, all chips of the host).
        num_cpus_per_slot: CPUs that each rank holds (default 1).
        timeout_s: seconds that a signal may stop a rank, or that its training actor's heartbeat may be late,
            before the rank counts as lost (default 60; at most 5 while an elastic trial changes its world). A
            heartbeat is due every 10 s, or every quarter of ``timeout_s`` if that is shorter. Each phase of
            the start may take ``timeout_s`` plus 0.25 s per training actor; the first phase, in which
            processes start and import modules, three times as long. The time between two reports is not
            limited: an epoch may take hours.
        replicate_pem: accepted for old scripts; no SSH key is needed any more.
        num_workers: instead of ``num_slots``: the total number of ranks, placed on as few hosts as possible
            if ``num_hosts`` is not given.
        num_cpus_per_worker: an alias of ``num_cpus_per_slot``.
        backend: ``"horovod"`` (default), or ``"torch"`` for ranks of `torch.distributed` (Gloo, and NCCL with
            ``use_gpu`` or tpu_dist with ``use_tpu``), which need no Horovod. `torch.distributed` is then
            initialised before ``func`` is called; ``func`` may also initialise it itself, as under torchrun.
        use_tpu: give each rank one chip of ``num_hosts`` TPU hosts; ``num_slots`` then counts chips. With
            ``backend="torch"``, the ranks use TorchTPU (`torch_tpu`), without ``backend`` torch_xla.
        tpu_type: with ``use_tpu``, the type of slice that a trial takes, as Ray and Cloud TPU name it
            (``"v4-32"``); it implies ``num_hosts``. Required if the cluster has several types.
        stall_timeout_s: seconds (default 1800) after which a collective that not all ranks have entered is
            an error. With torch_xla: seconds that a host's ranks may be idle (no report, no torch_xla
            operation, no computation) while Tune waits for them. Collectives of tpu_dist have no limit.
        preload: names of modules that ``func`` needs and that take long to import (``["transformers"]``).
            They are imported once per host, in the process that forks the ranks of all trials.
        nics: the network interface for the ranks' collectives, or several in order of preference. Default:
            the loopback if all ranks are on one host, otherwise the interface with the node's address in Ray.
        min_workers: minimum number of ranks. If set, the trial is elastic: it continues after a loss if
            this many ranks remain or return within ``min_workers_timeout_s``, and starts with this many if
            none of ``num_hosts``, ``num_slots`` and ``num_workers`` is given. See `commit`.
        max_workers: maximum number of ranks, to which an elastic trial grows when resources are free
            (default: the number that it starts with).
        min_workers_timeout_s: seconds that ranks wait for others while there are fewer than ``min_workers``
            (default 60).

    Raises:
        SpecError: an argument has the wrong type, is out of bounds, or conflicts with another.
        TrainingFunctionError: ``func`` cannot be called as ``func(config)``.
        OutsideTune: horovodrun, mpirun or torchrun started this program, once per rank.
        BackendMissing: the backend's package is not installed, or Horovod is not 0.28.x or lacks Gloo.
    """
    arguments = {name: given for name, given in locals().items() if name not in ("func", "replicate_pem")}
    check_training_function(func)
    _refuse_launcher()
    if replicate_pem:
        warnings.warn("replicate_pem has no effect: ranks are started by Ray, without SSH", stacklevel=2)
    spec = make_spec(**arguments)
    require_installed(spec)
    is_rank = RANK_VARIABLE in os.environ  # which imports the script
    if spec.backend_name == "xla" and not is_rank and importlib.util.find_spec("torch_tpu") is not None:
        print('use_tpu=True runs on torch_xla; with backend="torch", it runs on TorchTPU, its successor.')
    patch_tune()
    name = re.sub(r"\W", "_", function_name(func))
    shipped = ShippedFunction(func, uuid.uuid4().hex, max_bytes=queries.most_bytes_of_a_function())
    body = {
        "_spec": spec,
        "_shipped": shipped,
        "_name": name,
        # Pickled by reference: a process that unpickles this class imports this module, which prepares Tune's
        # searches. Under Ray Client, the server's process does so and runs the search.
        "_creator": staticmethod(DistributedTrainableCreator),
        "__doc__": func.__doc__,
        "__module__": DistributedTrainable.__module__,
    }
    return type(name, (DistributedTrainable,), body)


def _refuse_launcher() -> None:
    """Raise OutsideTune if a launcher has started copies of this program: each would run its own search."""
    if RANK_VARIABLE in os.environ:  # a rank that imports the script
        return
    for name, launcher in _LAUNCHERS.items():
        size = os.environ.get("WORLD_SIZE" if launcher == "torchrun" else name, "1")
        if name in os.environ and size.isdigit() and int(size) > 1:
            raise OutsideTune(
                f"{launcher} has started {size} copies of this program ({name} is set), and each would run a "
                f"whole search in the same folder. Start it once, without {launcher}: "
                f"python {sys.argv[0] or 'tune.py'}. The search starts the ranks of each trial itself: "
                "num_slots sets how many."
            )


# When this module is imported, not by the creator: a process that runs Tune for a Ray Client gets the class.
if RANK_VARIABLE not in os.environ:  # a rank imports the module of the search, but does not run it
    tune_run.prepare_runs(prepare)
