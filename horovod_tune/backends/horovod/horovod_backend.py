"""The backend for Horovod: its check in the driver, its launcher and rendezvous in the coordinator."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from horovod_tune.actors.actor_launcher import ActorLauncher
from horovod_tune.actors.rank_backend import PlacedRank
from horovod_tune.backends.horovod.horovod_world import HorovodWorld
from horovod_tune.backends.horovod.rendezvous import Rendezvous
from horovod_tune.errors import BackendMissing
from horovod_tune.horovod_build.installed import UNHIDE, hiding_file, installed_horovod
from horovod_tune.messages import RankInfo
from horovod_tune.spec.trial_spec import TrialSpec

_GLOO_MARK = b"HOROVOD_GLOO_RENDEZVOUS_ADDR"
_CURE = "Run `horovod-tune install-horovod`."


def require_installed() -> None:
    """Raise BackendMissing, with the cure, if Horovod is missing or unsuitable; does not import it."""
    if (hiding := hiding_file("horovod")) is not None:
        raise BackendMissing(f"{hiding} hides the installed Horovod. {UNHIDE}")
    package = importlib.util.find_spec("horovod")
    if package is None or not package.submodule_search_locations:
        raise BackendMissing(f"Horovod is not installed. {_CURE}")
    libraries = [
        library for root in package.submodule_search_locations for library in Path(root).glob("*/mpi_lib*.so")
    ]
    if not libraries:
        raise BackendMissing(
            f"Horovod is installed, but for no framework: it has no compiled library. {_CURE}"
        )
    if not any(_GLOO_MARK in library.read_bytes() for library in libraries):
        raise BackendMissing(f"Horovod is not built with Gloo. {_CURE}")
    present = installed_horovod()
    if present is not None and not present.version.startswith("0.28."):
        raise BackendMissing(f"Horovod must be 0.28.x, got {present.version}. {_CURE}")


def launcher(spec: TrialSpec, placement_group: Any, *, node_id: str) -> ActorLauncher:
    """Return the launcher of a trial with Horovod."""
    return ActorLauncher(
        spec,
        placement_group,
        node_id=node_id,
        make_backend=HorovodWorld,
        open_rendezvous=functools.partial(_open_rendezvous, spec, node_id),
    )


def _open_rendezvous(
    spec: TrialSpec, node_id: str, ranks: Sequence[PlacedRank]
) -> tuple[list[dict[str, str]], Callable[[], None]]:
    """Open Horovod's HTTP rendezvous in this process, which is on the node ``node_id``."""
    all_here = {each.info.node_id for each in ranks} == {node_id}
    rendezvous = Rendezvous("127.0.0.1" if all_here else ray.util.get_node_ip_address())
    environments = [
        horovod_environment(
            each.rank_info,
            host_key=each.info.node_id,
            rendezvous=rendezvous.address,
            interface=each.interface,
            gloo_timeout_s=spec.connect_timeout_s,
            stall_timeout_s=spec.stall_timeout_s,
        )
        for each in ranks
    ]
    return environments, rendezvous.close


def horovod_environment(
    rank_info: RankInfo,
    *,
    host_key: str,
    rendezvous: str,
    interface: str,
    gloo_timeout_s: float,
    stall_timeout_s: float,
) -> dict[str, str]:
    """Return the environment variables that Horovod 0.28 reads at ``hvd.init()``.

    ``host_key`` names the host in keys of the rendezvous. ``rendezvous`` is ``address:port/secret``: Horovod
    puts it between ``http://`` and ``:port/scope/key``, so every path begins with the secret.
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
        # The stall inspector shuts a world down only after it has warned, so the warning must come earlier.
        "HOROVOD_STALL_CHECK_TIME_SECONDS": str(max(1, min(60, round(stall_timeout_s / 2)))),
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": str(max(2, round(stall_timeout_s))),
    }
