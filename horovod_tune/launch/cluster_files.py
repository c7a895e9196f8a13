"""Where the cluster files are, and the source of this package that they ship to the nodes."""

from __future__ import annotations

import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

# The files of `cluster/`, which the package carries.
FILES = Path(__file__).resolve().parent / "files"


def cluster_file(name: str) -> Path:
    """Return the path of a file of `cluster/`.

    Raises:
        FileNotFoundError: this installation does not carry it.
    """
    path = FILES.resolve() / name
    if not path.is_file():
        raise FileNotFoundError(f"this installation of horovod_tune lacks {path}; install it again")
    return path


def load(name: str) -> Any:
    """Return the content of a YAML file of `cluster/`: one document, or a list of several."""
    import yaml

    documents = list(yaml.safe_load_all(cluster_file(name).read_text()))
    return documents[0] if len(documents) == 1 else documents


def package_source() -> Path:
    """Return a folder to `pip install` this very package from, with `cluster/` in it.

    A checkout is one. For a package that came from a wheel, one is written to the user's cache: links to the
    package and to its cluster files, and the metadata that the wheel carries.
    """
    package = Path(__file__).resolve().parents[1]
    checkout = package.parent
    if (checkout / "pyproject.toml").is_file() and (checkout / "cluster").is_dir():
        return checkout
    version = importlib.metadata.version("horovod_tune")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "horovod_tune" / f"source-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, target in {"horovod_tune": package, "cluster": FILES.resolve()}.items():
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    (folder / "pyproject.toml").write_text(_metadata(version))
    (folder / "setup.py").write_text("from setuptools import setup\n\nsetup()\n")
    (folder / "README.md").write_text("# horovod_tune\n")
    (folder / "constraints.txt").write_text(f"ray=={importlib.metadata.version('ray')}\n")
    return folder


def _metadata(version: str) -> str:
    needs = [line for line in importlib.metadata.requires("horovod_tune") or () if "extra ==" not in line]
    return "\n".join(
        [
            '[build-system]\nrequires = ["setuptools>=68"]\nbuild-backend = "setuptools.build_meta"\n',
            f'[project]\nname = "horovod_tune"\nversion = {json.dumps(version)}',
            f"dependencies = {json.dumps(needs)}\n",
            '[project.scripts]\nhorovod-tune = "horovod_tune.cli:main"\n',
            '[tool.setuptools.packages.find]\ninclude = ["horovod_tune*"]\n',
            "[tool.setuptools.package-data]",
            'horovod_tune = ["py.typed", "launch/files/*", "horovod_build/patches/*"]\n',
        ]
    )
