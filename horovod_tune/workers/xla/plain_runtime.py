"""Plain processes with ordinals in place of torch_xla's: several ranks and hosts without a TPU."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from horovod_tune.workers.xla.runtime import LaunchPlan, Ordinals, Serve


class PlainProcesses:
    """Ranks as plain processes with ordinals, for torch.distributed: several of them without a TPU.

    The function finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as under torchrun.
    """

    def load(self) -> None:
        import torch  # noqa: F401

    def launch(
        self, serve: Serve, plan: LaunchPlan, arguments: tuple[Any, ...], give_up: Callable[[], NoReturn]
    ) -> None:
        # The same pool as torch_xla's, so that processes start, fail and end in the same way.
        with concurrent.futures.ProcessPoolExecutor(
            plan.processes, mp_context=multiprocessing.get_context("fork")
        ) as pool:
            ranks = [
                pool.submit(_serve_plain, serve, plan, index, arguments) for index in range(plan.processes)
            ]
            for rank in ranks:
                rank.result()

    def open_cache(self) -> None:
        """There is nothing to compile."""

    def ordinals(self) -> Ordinals:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return Ordinals(*(int(os.environ[name]) for name in names))

    def enter_thread(self) -> Callable[[], None]:
        return lambda: None

    def lost_another(self, error: BaseException) -> bool:
        return lost_peer(error)

    def advice(self, error: BaseException) -> str:
        return ""

    def operations(self) -> int:
        """There is no device."""
        return 0

    def begin_baseline(self) -> None:
        """There is no device."""

    def restore(self, environment: Mapping[str, str]) -> list[str]:
        return []


def lost_peer(error: BaseException) -> bool:
    """Whether torch.distributed raised since a connection to another rank broke."""
    import torch

    if not torch.distributed.is_available():
        return False
    kinds = (torch.distributed.DistNetworkError, torch.distributed.DistBackendError)
    # Gloo's own errors are plain RuntimeErrors that begin with the place in its source.
    return isinstance(error, kinds) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))


def _serve_plain(serve: Serve, plan: LaunchPlan, index: int, arguments: tuple[Any, ...]) -> None:
    ordinal = plan.first_ordinal + index
    os.environ.update(
        RANK=str(ordinal),
        WORLD_SIZE=str(plan.world_size),
        LOCAL_RANK=str(index),
        LOCAL_WORLD_SIZE=str(plan.processes),
    )
    serve(ordinal, *arguments)
