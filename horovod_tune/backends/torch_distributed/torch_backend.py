"""The backend for torch.distributed: its check in the driver, its launcher in the coordinator."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import ray

from horovod_tune.actors.actor_launcher import ActorLauncher
from horovod_tune.actors.rank_backend import PlacedRank
from horovod_tune.backends.torch_distributed.torch_world import INSTALL_TORCH_TPU, TorchWorld
from horovod_tune.errors import BackendMissing, StartFailed
from horovod_tune.spec.trial_spec import TrialSpec
from horovod_tune.tpu.chips import TrialChips
from horovod_tune.tpu.reservation import Reservation


def require_installed() -> None:
    """Raise BackendMissing if torch is not installed; does not import it."""
    if importlib.util.find_spec("torch") is None:
        raise BackendMissing("torch is not installed. Run `pip install torch`.")


def require_torch_tpu() -> None:
    """Raise BackendMissing if torch_tpu is not installed; does not import it."""
    if importlib.util.find_spec("torch_tpu") is None:
        raise BackendMissing(f"torch_tpu is not installed. {INSTALL_TORCH_TPU}")


def launcher(spec: TrialSpec, placement_group: Any, *, node_id: str) -> ActorLauncher:
    """Return the launcher of a trial with torch.distributed."""
    device = "cuda" if spec.use_gpu else "tpu" if spec.use_tpu else "cpu"
    tpu = Reservation(spec, placement_group) if spec.use_tpu else None
    return ActorLauncher(
        spec,
        placement_group,
        node_id=node_id,
        make_backend=functools.partial(TorchWorld, spec.stall_timeout_s, spec.connect_timeout_s, device),
        open_rendezvous=functools.partial(_open_store, spec.timeout_s, device, tpu),
        tpu=tpu,
    )


def _open_store(
    timeout_s: float, device: str, tpu: Reservation | None, ranks: Sequence[PlacedRank]
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
        asked = first.actor.ask_backend.remote(first.token, TorchWorld.serve_store, address)
        port = ray.get(asked, timeout=timeout_s)
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
            "ACCELERATE_USE_CPU": str(device == "cpu"),
            **(tpu_environment(tpu.chips, rank_info.rank) if tpu and tpu.chips else {}),
        }
        for _, info, rank_info, interface, _ in ranks
    ]
    return environments, lambda: None


def tpu_environment(chips: TrialChips, rank: int) -> dict[str, str]:
    """Return what torch_tpu 0.2.0 reads besides torchrun's variables.

    It sets libtpu's variables from these, and gives a process the chip LOCAL_RANK, whatever Ray has set,
    unless TPU_VISIBLE_DEVICES names one.
    """
    return {
        **chips.variables(rank),
        "TPU_VISIBLE_DEVICES": str(chips.processes[rank][1]),
        "TORCH_TPU_SLICEBUILDER_ADDRESSES": ",".join(chips.addresses),
        "TORCH_TPU_TOPOLOGY": chips.mesh(),
        "ACCELERATE_TORCH_DEVICE": "tpu",  # as Ray Train sets it
    }
