"""Runs in each process of a TPU trial: its devices. No other module of this package uses torch_xla's APIs.

Checked against torch_xla 2.9.0: `torch_xla.runtime`, `torch_xla.core.xla_model`, `torch_xla.debug.metrics`,
and what `torch_xla.launch` uses: `torch_xla._internal.pjrt.run_multiprocess` (the processes of a host),
`_run_thread_per_device` (the devices of a process), and `torch_xla._XLAC` (a thread's device).
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from horovod_tune.actors.rank_backend import RankBackend
from horovod_tune.backends.torch_xla import compile_cache
from horovod_tune.messages import FailureKind, RankInfo
from horovod_tune.tpu.chips import PEER_ENDED

# Variables in which Ray names all chips of an actor. A rank has one chip: torch_xla or `LaunchPlan` names it.
_SET_BY_RAY = ("TPU_VISIBLE_CHIPS", "TPU_CHIPS_PER_HOST_BOUNDS", "TPU_HOST_BOUNDS")
_LAUNCHED_ALREADY = """
The training function already runs in torch_xla's processes, one per chip, so it cannot launch more. Pass to
DistributedTrainableCreator the function that you pass to torch_xla.launch, xmp.spawn or notebook_launcher,
not the function that calls them.
"""


class TorchXla(RankBackend):
    """The devices of one process, as in those that ``torch_xla.launch`` starts: one, on TPU v2 and v3 two."""

    collectives = None
    device = "xla"

    def __init__(self) -> None:
        # By rank: its device, as torch_xla names it.
        self._devices: dict[int, str] = {}

    def load(self) -> None:
        import torch_xla.core.xla_model
        import torch_xla.debug.metrics  # noqa: F401

    def answers(self) -> Sequence[Callable[..., Any]]:
        return self.count_processes, self.launch, self.operations

    def count_processes(self, inherited: dict[str, str], planned: dict[str, str]) -> int:
        """Return how many processes torch_xla would start on this host; arguments as `launch`'s."""
        self.load()
        set_variables(inherited, planned)
        import torch_xla.runtime as xr
        from torch_xla._internal import tpu
        from torch_xla.experimental import plugins

        if plugins.using_dynamic_plugins():
            return int(plugins.default().physical_chip_count())
        return int(tpu.num_local_processes()) if xr.device_type() == "TPU" else 1

    def launch(
        self, inherited: dict[str, str], planned: dict[str, str], local_rank: int, local_size: int
    ) -> list[tuple[int, ...]]:
        """Start the runtime, which waits for the slice's other processes; return this one's `RankInfo`s.

        The ranks' numbers are as if their host were the only one.

        Args:
            inherited: the host actor's environment.
            planned: the variables of the `LaunchPlan` for this process.
            local_rank, local_size: its place among the host's processes, and their number.
        """
        self.load()
        set_variables(inherited, planned)
        import torch_xla
        import torch_xla.core.xla_model as xm
        import torch_xla.runtime as xr
        from torch_xla._internal import pjrt

        pjrt.initialize_multiprocess(local_rank, local_size)
        self._open_cache()
        # Under torch_xla.launch too, processes end without it: it may wait for computations of other hosts.
        atexit.unregister(torch_xla._prepare_to_exit)
        # Again, since the runtime has replaced its handlers.
        faulthandler.disable()
        faulthandler.enable()
        rank_infos = []
        for device in xm.get_xla_supported_devices():
            torch_xla._XLAC._xla_set_default_device(device)
            xr._init_world_size_ordinal()
            numbers = xr.global_ordinal(), xr.world_size(), xr.local_ordinal(), xr.local_device_count()
            rank_infos.append(RankInfo(*numbers, cross_rank=0, cross_size=1))
            self._devices[numbers[0]] = device
        return [astuple(each) for each in rank_infos]

    def _open_cache(self) -> None:
        """Set where compiled graphs are kept, before anything is computed."""
        import torch_xla
        import torch_xla.runtime as xr

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

    def enter(self, rank_info: RankInfo, name: str) -> None:
        """Make this thread, which is about to call the training function, act as the rank."""
        import torch_xla

        torch_xla._XLAC._xla_set_default_device(self._devices[rank_info.rank])

    def describe_failure(
        self, error: BaseException, stall_report: Callable[[], str]
    ) -> tuple[FailureKind, str, dict[int, str]]:
        """Describe the training function's error.

        It is ``DISCONNECTED`` if another rank's end caused the error: the traceback then shows no cause.
        """
        is_runtime_error = isinstance(error, RuntimeError)
        text = str(error) if is_runtime_error or isinstance(error, ValueError) else ""
        # Gloo's own errors name a place in its source.
        has_lost_peer = is_runtime_error and (text.startswith(PEER_ENDED) or "gloo/transport" in text)
        # Without an import: only torch raises these.
        torch_errors = {"DistNetworkError", "DistBackendError"}
        if has_lost_peer or torch_errors.intersection(each.__name__ for each in type(error).__mro__):
            return FailureKind.DISCONNECTED, "", {}
        # torch_xla's messages if it cannot launch processes.
        begins = ("Runtime is already initialized", "Unsupported nprocs")
        return FailureKind.RAISED, _LAUNCHED_ALREADY if text.startswith(begins) else "", {}

    def operations(self) -> int:
        """Return a number that changes when this process does anything with its device."""
        import torch_xla.debug.metrics as metrics

        # Tensors created and freed, graphs found and compiled, transfers: a step adds hundreds of these.
        return sum(metrics.counter_value(name) or 0 for name in metrics.counter_names())


def set_variables(inherited: Mapping[str, str], planned: Mapping[str, str]) -> None:
    """Set the environment of a process: the host actor's, then the variables of its own.

    What the import of torch_xla has set, such as libtpu's flags, takes precedence over the actor's.
    """
    merged: dict[str, Any] = {**inherited, **os.environ}
    # With TORCHELASTIC_RUN_ID, torch_xla would treat the process as a rank of torchrun.
    for name in (*_SET_BY_RAY, "TORCHELASTIC_RUN_ID"):
        merged.pop(name, None)
        os.environ.pop(name, None)
    os.environ.update({**merged, **planned})
