"""Reads which torch and which Horovod are installed, without importing either.

An import takes seconds, and fails in exactly the cases of interest here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
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

    # As pip shows it: ``0.28.1+ht7.cpu`` if `install-horovod` built it.
    version: str
    # The torch it was compiled for; None if it was built without torch.
    torch_version: str | None

    @property
    def patch_level(self) -> str | None:
        """The level of our patches (``"ht7"``), or None for any other build."""
        level = self.version.partition("+")[2].split(".")[0]
        return level if level.startswith("ht") else None


def installed_torch() -> InstalledTorch | None:
    """Return this environment's torch, or None."""
    package = _package_folder("torch")
    if package is None or not (package / "version.py").is_file():
        return None
    return parse_torch_version((package / "version.py").read_text())


def parse_torch_version(source: str) -> InstalledTorch | None:
    """Return what torch's `version.py` states, or None if it states no version.

    >>> parse_torch_version("__version__ = '2.13.0+cu128'\\ncuda: Optional[str] = '12.8'\\n")
    InstalledTorch(version='2.13.0+cu128', cuda='12.8')
    """
    values = dict(re.findall(r"""^(__version__|cuda)\b[^=\n]*= *["']([^"']+)["']""", source, re.MULTILINE))
    return InstalledTorch(values["__version__"], values.get("cuda")) if "__version__" in values else None


def installed_horovod() -> InstalledHorovod | None:
    """Return this environment's Horovod, or None."""
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
    """Return what to try when ranks could not connect: nothing if Horovod has our newest patches.

    >>> "port scan" in advice_on_failed_init(InstalledHorovod("0.28.1", "2.13.0"))
    True
    """
    if horovod is None or horovod.patch_level == PATCH_LEVEL:
        return ""
    return (
        f"Horovod {horovod.version} accepts any client on a rank's port, so a port scan or another user of "
        "the host can abort hvd.init(). The build of `horovod-tune install-horovod` does not."
    )


def _package_folder(name: str) -> Path | None:
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))
