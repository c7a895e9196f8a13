"""The backend for torch.distributed: its check in the driver, its launcher in the coordinator."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import ray

from horovod_tune.actors.actor_launcher import ActorLauncher
from horovod_tune.actors.rank_backend import PlacedRank
from horovod_tune.errors import BackendMissing, StartFailed
from horovod_tune.spec.trial_spec import TrialSpec
from horovod_tune.torch_dist.torch_world import TorchWorld


def require_installed() -> None:
    """Raise BackendMissing if torch is not installed; does not import it."""
    if importlib.util.find_spec("torch") is None:
        raise BackendMissing("torch is not installed. Run `pip install torch`.")


def launcher(spec: TrialSpec, placement_group: Any, *, node_id: str) -> ActorLauncher:
    """Return the launcher of a trial with torch.distributed."""
    return ActorLauncher(
        spec,
        placement_group,
        node_id=node_id,
        make_backend=functools.partial(
            TorchWorld, spec.stall_timeout_s, spec.connect_timeout_s, spec.use_gpu
        ),
        open_rendezvous=functools.partial(_open_store, spec.timeout_s, spec.use_gpu),
    )


def _open_store(
    timeout_s: float, use_gpu: bool, ranks: Sequence[PlacedRank]
) -> tuple[list[dict[str, str]], Callable[[], None]]:
    """Open a TCPStore in rank 0's process, since this process does not import torch.

    Returns the variables that torchrun or Accelerate would set for each rank. The store ends with rank 0;
    `RankBackend.abort` ends the ranks' waits.
    """
    by_rank = sorted(ranks, key=lambda each: each.rank_info.rank)
    hosts = list(dict.fromkeys(each.info.node_id for each in by_rank))
    first = by_rank[0]
    address = "127.0.0.1" if len(hosts) == 1 else first.info.node_ip
    try:
        port = ray.get(first.actor.serve_store.remote(address, first.token), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        late = f"did not open a TCPStore within timeout_s={timeout_s:g} s"
        raise StartFailed(f"rank 0 on {first.info.host} {late}") from None
    except ray.exceptions.RayError as error:
        raise StartFailed(f"rank 0 on {first.info.host} could not open a TCPStore: {error}") from error
    environments = [
        {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "RANK": str(rank_info.rank),
            "WORLD_SIZE": str(rank_info.size),
            "LOCAL_RANK": str(rank_info.local_rank),
            "LOCAL_WORLD_SIZE": str(rank_info.local_size),
            "GROUP_RANK": str(hosts.index(info.node_id)),
            "GROUP_WORLD_SIZE": str(len(hosts)),
            "GLOO_SOCKET_IFNAME": interface,
            # Without it, ranks that have no GPU do not see each other in Accelerate and Transformers.
            "ACCELERATE_USE_CPU": str(not use_gpu),
        }
        for _, info, rank_info, interface, _ in ranks
    ]
    return environments, lambda: None
