"""Plain processes instead of torch_xla's: several ranks and hosts on real code, without a TPU."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from horovod_tune.messages import FailureKind, RankInfo, WorkerInfo
from horovod_tune.xla.host_actor import HostActor
from horovod_tune.xla.topology import LaunchPlan
from horovod_tune.xla.xla_launcher import XlaLauncher

HERE = str(Path(__file__).parent)


class PlainProcesses:
    """A runtime, in place of `TorchXla`, whose ranks are processes for torch.distributed.

    The function finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as under torchrun.
    """

    def launch(
        self,
        serve: Callable[..., None],
        plan: LaunchPlan,
        arguments: tuple[Any, ...],
        abort: Callable[[], NoReturn],
    ) -> None:
        # The same pool as torch_xla's, so that processes start, fail and end in the same way.
        with concurrent.futures.ProcessPoolExecutor(
            len(plan.of_each), mp_context=multiprocessing.get_context("fork")
        ) as pool:
            ranks = [pool.submit(_serve, serve, environment, arguments) for environment in plan.of_each]
            for rank in ranks:
                rank.result()

    def open_cache(self) -> None:
        """There is nothing to compile."""

    def rank_info(self) -> RankInfo:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return RankInfo(*(int(os.environ[name]) for name in names), cross_rank=0, cross_size=1)

    def enter_thread(self) -> Callable[[], None]:
        return lambda: None

    def describe_failure(self, error: BaseException) -> tuple[FailureKind, str]:
        has_lost_peer = isinstance(error, dist.DistError) or "gloo/transport" in str(error)
        return FailureKind.DISCONNECTED if has_lost_peer else FailureKind.RAISED, ""

    def operations(self) -> int:
        """There is no device."""
        return 0

    def begin_baseline(self) -> None:
        """There is no device."""

    def restore(self) -> list[str]:
        return []


def _serve(serve: Callable[..., None], environment: Mapping[str, str], arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    serve(int(environment["RANK"]), *arguments)


class PlainHostActor(HostActor):
    """A host actor whose processes can import this file."""

    def __init__(self, *arguments: Any) -> None:
        sys.path.append(HERE)
        super().__init__(*arguments)


class PlainLauncher(XlaLauncher):
    """Starts ``num_slots`` processes on the host of each bundle; all hosts are this machine."""

    actor_class = PlainHostActor
    runtime_path = "plain_processes:PlainProcesses"

    def _plans(self, facts: Sequence[WorkerInfo]) -> list[LaunchPlan]:
        slots = self._spec.num_slots
        assert slots is not None
        order = sorted(range(len(facts)), key=lambda i: facts[i].node_id != self._node_id)
        address = "127.0.0.1" if len(facts) == 1 else facts[order[0]].node_ip
        common = {"MASTER_ADDR": address, "MASTER_PORT": str(_free_port()), "LOCAL_WORLD_SIZE": str(slots)}
        common["WORLD_SIZE"] = str(len(facts) * slots)
        return [
            LaunchPlan(
                environment=common,
                of_each=tuple(
                    {**common, "RANK": str(order.index(i) * slots + local), "LOCAL_RANK": str(local)}
                    for local in range(slots)
                ),
            )
            for i in range(len(facts))
        ]


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("", 0))
        port: int = one.getsockname()[1]
        return port
