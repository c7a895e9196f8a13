"""Horovod's backend, as the driver (is it installed?) and the coordinator (its launcher) use it."""

from __future__ import annotations

import importlib.util
import mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from horovod_tune.errors import BackendMissing

if TYPE_CHECKING:
    from horovod_tune.actors.actor_launcher import ActorLauncher
    from horovod_tune.spec.trial_spec import TrialSpec

_GLOO_MARK = b"HOROVOD_GLOO_RENDEZVOUS_ADDR"
_CURE = "Run `horovod-tune install-horovod`."


def require_installed() -> None:
    """Raise BackendMissing if no rank could start, with the cure; Horovod is not imported for that."""
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
    if not any(_mentions(library, _GLOO_MARK) for library in libraries):
        raise BackendMissing(f"Horovod is not built with Gloo. {_CURE}")


def _mentions(library: Path, mark: bytes) -> bool:
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(mark) >= 0


def launcher(spec: TrialSpec, placement_group: Any, *, node_id: str) -> ActorLauncher:
    """Return what starts the ranks of a trial with Horovod."""
    from horovod_tune.actors.actor_launcher import ActorLauncher
    from horovod_tune.gloo.horovod_world import HorovodWorld
    from horovod_tune.gloo.world_rendezvous import HorovodRendezvous

    return ActorLauncher(
        spec,
        placement_group,
        node_id=node_id,
        make_backend=HorovodWorld,
        rendezvous=HorovodRendezvous(spec),
    )
