"""Runs in the coordinator: the rendezvous of Horovod's ranks, and their environment."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from horovod_tune.gloo.rendezvous import Rendezvous
from horovod_tune.messages import RankInfo, WorkerInfo
from horovod_tune.spec.trial_spec import TrialSpec


class HorovodRendezvous:
    """Implements `actors.rank_backend.WorldRendezvous` with Horovod's HTTP rendezvous in this process."""

    def __init__(self, spec: TrialSpec) -> None:
        self._gloo_timeout_s = spec.connect_timeout_s
        self._stall_timeout_s = spec.stall_timeout_s
        self._rendezvous: Rendezvous | None = None

    def open(
        self,
        actors: Sequence[Any],
        infos: Sequence[WorkerInfo],
        rank_infos: Sequence[RankInfo],
        interfaces: Sequence[str],
    ) -> list[dict[str, str]]:
        self.close()
        single_host = len({each.node_id for each in infos}) == 1
        self._rendezvous = Rendezvous("127.0.0.1" if single_host else ray.util.get_node_ip_address())
        return [
            horovod_environment(
                rank_info,
                host_key=info.node_id,
                rendezvous=self._rendezvous.address,
                interface=interface,
                gloo_timeout_s=self._gloo_timeout_s,
                stall_timeout_s=self._stall_timeout_s,
            )
            for info, rank_info, interface in zip(infos, rank_infos, interfaces, strict=True)
        ]

    def abandon(self) -> None:
        # A rank that waits there for a peer otherwise retries until Gloo's own timeout.
        if self._rendezvous is not None:
            self._rendezvous.close()

    def close(self) -> None:
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None


def horovod_environment(
    rank_info: RankInfo,
    *,
    host_key: str,
    rendezvous: str,
    interface: str,
    gloo_timeout_s: float,
    stall_timeout_s: float,
) -> dict[str, str]:
    """Return what Horovod 0.28 reads from the environment at ``hvd.init()``.

    ``host_key`` names the host in keys of the rendezvous. ``rendezvous`` is ``address:port/secret``: Horovod
    puts it between ``http://`` and ``:port/scope/key``, so the secret becomes the head of every path.
    """
    return {
        "HOROVOD_RANK": str(rank_info.rank),
        "HOROVOD_SIZE": str(rank_info.size),
        "HOROVOD_LOCAL_RANK": str(rank_info.local_rank),
        "HOROVOD_LOCAL_SIZE": str(rank_info.local_size),
        "HOROVOD_CROSS_RANK": str(rank_info.cross_rank),
        "HOROVOD_CROSS_SIZE": str(rank_info.cross_size),
        "HOROVOD_HOSTNAME": host_key,
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": rendezvous,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "0",
        "HOROVOD_GLOO_IFACE": interface,
        "HOROVOD_GLOO_TIMEOUT_SECONDS": str(max(1, round(gloo_timeout_s))),
        # The inspector shuts down at its warning time at the earliest, so that has to come first.
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(max(1, min(60, round(stall_timeout_s / 2)))),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(max(2, round(stall_timeout_s))),
    }
