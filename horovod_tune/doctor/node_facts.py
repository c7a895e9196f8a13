"""What one machine has, as plain data: it is pickled between nodes and printed as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class TorchFacts:
    """The torch of an environment."""

    version: str
    # The CUDA release it was built for; None for a CPU build.
    cuda: str | None = None
    # The names of the GPUs that it sees.
    gpus: tuple[str, ...] = ()
    # Why it cannot be imported.
    error: str | None = None


@dataclass(frozen=True)
class HorovodFacts:
    """The Horovod of an environment."""

    version: str
    # The patches of `install-horovod` that it carries; None where another build made it.
    patch_level: str | None = None
    built_for_torch: str | None = None
    gloo: bool = False
    nccl: bool = False
    mpi: bool = False
    # Why it cannot be imported.
    error: str | None = None


@dataclass(frozen=True)
class NodeInfo:
    """One machine and the Python environment in which the facts were gathered.

    Sizes are in bytes.
    """

    host: str
    system: str
    python: str
    executable: str
    cpus: int
    memory: int
    # Versions of this package's own requirements; None for one that is missing.
    packages: dict[str, str | None]
    # Requirements of this package that what is installed does not meet.
    unmet: tuple[str, ...] = ()
    # Packages that are there but cannot be imported, and why.
    broken: dict[str, str] = field(default_factory=dict)
    # Packages whose import had not ended after so many seconds: nothing more is known of them.
    slow: dict[str, float] = field(default_factory=dict)
    torch: TorchFacts | None = None
    horovod: HorovodFacts | None = None
    # The GPUs' device files, whether or not torch can use them.
    gpu_devices: tuple[str, ...] = ()
    # What the host's own name resolves to.
    host_addresses: tuple[str, ...] = ()
    # The network interfaces that are up, and their addresses.
    interfaces: dict[str, tuple[str, ...]] = field(default_factory=dict)
    temporary_folder: str = "/tmp"
    temporary_free: int = 0
    # The size of /dev/shm; None where there is none.
    shared_memory: int | None = None
    shared_memory_free: int | None = None
    # How many files a process may have open, at most (the hard limit).
    open_files: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the facts as what `json.dumps` takes."""
        return asdict(self)
