"""Says which torch and which Horovod are in this environment, without importing either.

An import takes seconds, and fails in just the cases that are of interest here.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from horovod_tune.horovod_build.patches import PATCH_LEVEL


@dataclass(frozen=True)
class InstalledTorch:
    """The torch of this environment, as its `version.py` states it."""

    version: str
    # The CUDA release it was built for, such as ``"12.8"``; None for a CPU build.
    cuda: str | None

    @property
    def release(self) -> tuple[int, int]:
        """The version's major and minor number."""
        major, minor = self.version.split("+")[0].split(".")[:2]
        return int(major), int(minor)


@dataclass(frozen=True)
class InstalledHorovod:
    """The Horovod of this environment."""

    # As pip shows it: ``0.28.1+ht4.cpu`` where `install-horovod` built it.
    version: str
    # The torch it was compiled for; None where it was built without torch.
    torch_version: str | None

    @property
    def patch_level(self) -> str | None:
        """The patches it carries (``"ht4"``), or None where another build made it."""
        local = self.version.partition("+")[2]
        level = local.split(".")[0]
        return level if level.startswith("ht") else None


def installed_torch() -> InstalledTorch | None:
    """Return this environment's torch, or None where it has none."""
    package = _package_folder("torch")
    if package is None or not (package / "version.py").is_file():
        return None
    said = _assignments((package / "version.py").read_text())
    version = said.get("__version__")
    return None if version is None else InstalledTorch(version, said.get("cuda"))


def installed_horovod() -> InstalledHorovod | None:
    """Return this environment's Horovod, or None where it has none."""
    package = _package_folder("horovod")
    try:
        version = importlib.metadata.version("horovod")
    except importlib.metadata.PackageNotFoundError:
        return None
    if package is None:
        return None
    metadata = package / "metadata.json"
    built_for = json.loads(metadata.read_text()) if metadata.is_file() else {}
    return InstalledHorovod(version, built_for.get("pytorch"))


def advice_on_failed_init(horovod: InstalledHorovod | None) -> str:
    """Return what to try where ranks could not connect: nothing where Horovod has our newest patches.

    >>> "port scanner" in advice_on_failed_init(InstalledHorovod("0.28.1", "2.13.0"))
    True
    """
    if horovod is None or horovod.patch_level == PATCH_LEVEL:
        return ""
    return (
        f"Horovod {horovod.version} takes whoever connects first to a rank's port for a rank, so that a port "
        "scanner or another user of the host can end hvd.init(). The one that `horovod-tune install-horovod` "
        "builds does not."
    )


def _package_folder(name: str) -> Path | None:
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _assignments(source: str) -> dict[str, str | None]:
    """Return the module-level names of `source` that are assigned a string or None.

    >>> _assignments("__version__ = '2.13.0+cpu'\\ncuda: Optional[str] = None\\ndebug = False\\n")
    {'__version__': '2.13.0+cpu', 'cuda': None}
    """
    said: dict[str, str | None] = {}
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                pass
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=value)):
                pass
            case _:
                continue
        if value is None or isinstance(value, str):
            said[name] = value
    return said
