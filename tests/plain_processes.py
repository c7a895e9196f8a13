"""Plain processes instead of torch_xla's: several ranks and hosts on real code, without a TPU."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from horovod_tune.actors.rank_backend import RankBackend
from horovod_tune.backends.torch_xla.host_actor import HostActor
from horovod_tune.backends.torch_xla.topology import LaunchPlan
from horovod_tune.backends.torch_xla.torch_xla_runtime import set_variables
from horovod_tune.backends.torch_xla.xla_launcher import XlaLauncher
from horovod_tune.messages import FailureKind, RankInfo, WorkerInfo

HERE = str(Path(__file__).parent)


class PlainProcesses(RankBackend):
    """In place of `TorchXla`: its ranks are for torch.distributed.

    The function finds RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, as under torchrun. With
    RANKS_OF_A_PROCESS=2, each process has two ranks, and RANK is the first one's.
    """

    collectives = None

    def load(self) -> None:
        import torch  # noqa: F401

    def answers(self) -> Sequence[Callable[..., Any]]:
        return self.count_processes, self.launch, self.operations

    def count_processes(self, inherited: dict[str, str], planned: dict[str, str]) -> int:
        set_variables(inherited, planned)
        return int(os.environ.get("PROCESSES", "1"))

    def launch(
        self, inherited: dict[str, str], planned: dict[str, str], local_rank: int, local_size: int
    ) -> list[tuple[int, ...]]:
        set_variables(inherited, planned)
        if os.environ.get("FAILS_AT") == str(local_rank):
            raise OSError("the chip is in use")
        if os.environ.get("DIES_AT") == str(local_rank):
            os.kill(os.getpid(), signal.SIGSEGV)
        here = int(os.environ.get("RANKS_OF_A_PROCESS", "1"))
        while os.environ.get("WAITS_FOR_OTHERS"):
            time.sleep(0.1)
        first, size = int(os.environ.get("RANK", local_rank * here)), int(os.environ["WORLD_SIZE"])
        local = [local_rank * here + each for each in range(here)]
        return [
            astuple(RankInfo(first + each, size, local[each], local_size * here, cross_rank=0, cross_size=1))
            for each in range(here)
        ]

    def describe_failure(
        self, error: BaseException, stall_report: Callable[[], str]
    ) -> tuple[FailureKind, str, dict[int, str]]:
        import torch.distributed as dist

        has_lost_peer = isinstance(error, dist.DistError) or "gloo/transport" in str(error)
        return FailureKind.DISCONNECTED if has_lost_peer else FailureKind.RAISED, "", {}

    def operations(self) -> int:
        """There is no device."""
        return 0


class PlainHostActor(HostActor):
    """A host actor whose processes can import this file."""

    def __init__(self, make_backend: Any, *arguments: Any) -> None:
        sys.path.append(HERE)
        import plain_processes  # a copy that the template can import, unlike the class that was pickled

        super().__init__(getattr(plain_processes, make_backend.__name__), *arguments)


class PlainLauncher(XlaLauncher):
    """Starts ``num_slots`` processes on the host of each bundle; all hosts are this machine."""

    actor_class = PlainHostActor
    make_backend = PlainProcesses

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
