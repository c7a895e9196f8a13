"""Starts the ranks of a host with torch_xla. No other module of this package uses torch_xla's APIs.

Imported in the ranks' parent, before it forks; tests have a class with the same methods for plain processes.
Checked against torch_xla 2.9.0: `torch_xla.launch`, `torch_xla.runtime`, `torch_xla.core.xla_model`,
`torch_xla.debug.metrics`, and the undocumented `torch_xla.experimental.plugins` (the processes of a host),
`torch_xla._internal.pjrt` (how a process gets its device) and `torch_xla._XLAC` (a thread's device).
"""

from __future__ import annotations

import functools
import gc
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as metrics
import torch_xla.runtime as xr
from torch_xla._internal import pjrt
from torch_xla._internal.tpu import TpuPlugin
from torch_xla.experimental import plugins

from horovod_tune.messages import FailureKind, RankInfo
from horovod_tune.xla import compile_cache
from horovod_tune.xla.topology import LaunchPlan

_LAUNCHED_ALREADY = """
The training function already runs in torch_xla's processes, one per chip, so it cannot launch more. Pass to
DistributedTrainableCreator the function that you pass to torch_xla.launch, xmp.spawn or notebook_launcher,
not the function that calls them.
"""


class TorchXla:
    """Ranks as ``torch_xla.launch`` starts them: a process per chip."""

    def launch(
        self,
        serve: Callable[..., None],
        plan: LaunchPlan,
        arguments: tuple[Any, ...],
        abort: Callable[[], NoReturn],
    ) -> None:
        """Run ``serve(ordinal, *arguments)`` in every rank; return or raise when they have ended.

        A process that fails before ``serve`` calls ``abort()`` in its exception handler: the others may wait
        for it.
        """
        _abort_without_device(abort)
        # With this variable torch_xla would treat the process as a rank of torchrun.
        os.environ.pop("TORCHELASTIC_RUN_ID", None)
        if plan.of_each:
            _use_chips(plan.of_each)
        # The parent has imported everything and touched no device, so it can fork. A forked rank starts in
        # 0.2 s; a spawned rank takes 5 s and 300 MB. Notebook launchers on TPUs fork, too.
        torch_xla.launch(serve, args=arguments, start_method="fork")

    def open_cache(self) -> None:
        """Set where compiled graphs are kept. Runs in each rank, before it computes anything."""
        directory = compile_cache.directory_of(
            os.environ,
            device=xr.device_type() or "",
            host=socket.gethostname(),
            chip=os.environ.get("TPU_VISIBLE_CHIPS", "0"),
            version=torch_xla.__version__,
        )
        if directory is None:
            return
        try:
            compile_cache.make_room(directory)
        except OSError as error:
            if compile_cache.VARIABLE in os.environ:
                raise
            print(f"Compiled graphs are not kept beyond this process: {error}", file=sys.stderr)
            return
        xr.initialize_cache(str(directory))

    def rank_info(self) -> RankInfo:
        """Return this rank's numbers, as if its host were the only one.

        Runs in the thread in which ``serve`` was called.
        """
        rank, size = xr.global_ordinal(), xr.world_size()
        local_rank, local_size = xr.local_ordinal(), xr.local_device_count()
        return RankInfo(rank, size, local_rank, local_size, cross_rank=0, cross_size=1)

    def enter_thread(self) -> Callable[[], None]:
        """Return a function that lets another thread of this process act as this rank."""
        # On TPU v2 and v3, a process has two devices, so two ranks; each thread has its own default device.
        device = torch_xla._XLAC._xla_get_default_device()
        return lambda: torch_xla._XLAC._xla_set_default_device(device)

    def describe_failure(self, error: BaseException) -> tuple[FailureKind, str]:
        """Return the kind of the training function's error, and advice to add to its traceback.

        It is ``DISCONNECTED`` if another rank's end caused the error: the traceback then shows no cause.
        """
        is_runtime_error = isinstance(error, RuntimeError)
        text = str(error) if is_runtime_error or isinstance(error, ValueError) else ""
        # The prefixes of the runtime's status codes for a peer that has ended (absl's canonical errors).
        gone = ("UNAVAILABLE:", "ABORTED:", "DEADLINE_EXCEEDED:")
        # Gloo's own errors name a place in its source.
        has_lost_peer = is_runtime_error and (text.startswith(gone) or "gloo/transport" in text)
        if has_lost_peer or isinstance(error, dist.DistNetworkError | dist.DistBackendError):
            return FailureKind.DISCONNECTED, ""
        # torch_xla's messages if it cannot launch processes.
        begins = ("Runtime is already initialized", "Unsupported nprocs")
        return FailureKind.RAISED, _LAUNCHED_ALREADY if text.startswith(begins) else ""

    def operations(self) -> int:
        """Return a number that changes when this process does anything with its device."""
        # Tensors created and freed, graphs found and compiled, transfers: a step adds hundreds of these.
        return sum(metrics.counter_value(name) or 0 for name in metrics.counter_names())

    def begin_baseline(self) -> None:
        """Record the device's state before the first trial."""
        self._seed = xm.get_rng_state()
        self._spmd = xr.is_spmd()

    def restore(self) -> list[str]:
        """Restore the device's state, after everything else; return what could not be restored."""
        if xr.is_spmd() != self._spmd:
            return ["the trial switched SPMD on, which cannot be undone in a process"]
        torch._dynamo.reset()
        gc.collect()
        # Graphs that were traced and never run belong to the trial that has ended.
        torch_xla.sync(wait=True)
        xm.wait_device_ops()
        alive = metrics.counter_value("CreateXlaTensor") or 0
        alive -= metrics.counter_value("DestroyXlaTensor") or 0
        if alive > 0:
            return [f"{alive} tensor(s) are still on the device"]
        metrics.clear_all()
        xm.set_rng_state(self._seed)
        return []


def _use_chips(of_each: Sequence[Mapping[str, str]]) -> None:
    """Make torch_xla start one process per item of ``of_each``, with this environment, not one per chip."""

    class ChipSubset(TpuPlugin):
        def physical_chip_count(self) -> int:
            return len(of_each)

        def configure_multiprocess(self, local_rank: int, local_world_size: int) -> None:
            os.environ.update(of_each[local_rank])
            super().configure_multiprocess(local_rank, local_world_size)

    plugins.register_plugin("TPU", ChipSubset())


def _abort_without_device(abort: Callable[[], NoReturn]) -> None:
    """Make a process that cannot use its chip end: the other processes of the slice would wait for it."""
    initialize = pjrt.initialize_multiprocess

    @functools.wraps(initialize)
    def initialize_or_abort(local_rank: int, local_world_size: int) -> None:
        try:
            initialize(local_rank, local_world_size)
        except Exception:  # any: sent to the host actor, which raises it
            abort()

    pjrt.initialize_multiprocess = initialize_or_abort
