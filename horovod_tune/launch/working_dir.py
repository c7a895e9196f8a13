"""What travels to the cluster as the job's working directory: the script's folder and the paths of --ship."""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from horovod_tune.launch.values import LaunchError

# Ray carries 500 MiB at most from the head to the other machines.
LIMIT = 480 * 2**20
LEFT_OUT = ("__pycache__", "*.pyc", "node_modules", "*.egg-info")


def files_to_ship(
    folder: Path, ship: Sequence[str] = (), *, results: Path, exclude: Sequence[str] = ()
) -> dict[str, Path]:
    """Return what goes along: the path in the working directory, and the file here.

    Hidden files stay (keys, ``.git``), and so do virtual environments, ``ray_results``, the folder that
    results come to, and what `exclude` and a ``.rayignore`` file name. What `ship` names goes in any case,
    under its own name.

    Raises:
        LaunchError: a path of `ship` is not there, two have one name, or all of it is too large to travel.
    """
    ignore = folder / ".rayignore"
    lines = ignore.read_text().splitlines() if ignore.is_file() else []
    patterns = [
        *LEFT_OUT,
        *exclude,
        *(line.strip().rstrip("/") for line in lines if line.strip()[:1] not in ("", "#")),
    ]
    found = _walk(folder, patterns, results.resolve())
    for given in ship:
        path = Path(given).expanduser().resolve()
        if not path.exists():
            raise LaunchError(f"--ship must name a file or folder, got {given!r}, which is not there")
        shipped = {path.name: path} if path.is_file() else _walk(path, LEFT_OUT, results.resolve(), path.name)
        for name, file in shipped.items():
            if found.get(name, file) != file:
                raise LaunchError(f"--ship {given}: the script's folder has another {name}")
            found[name] = file
    sizes = {name: file.stat().st_size for name, file in found.items()}
    if sum(sizes.values()) > LIMIT:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        shown = ", ".join(f"{name} ({sizes[name] / 2**20:.0f} MiB)" for name in largest)
        raise LaunchError(
            f"{folder} has {sum(sizes.values()) / 2**20:.0f} MiB to ship, {LIMIT // 2**20} MiB is the most: "
            f"{shown}. Leave files out with --exclude PATTERN, or put the script into a folder of its own"
        )
    return found


def _walk(folder: Path, patterns: Sequence[str], results: Path, under: str = "") -> dict[str, Path]:
    found = {}
    for top, folders, names in os.walk(folder):
        here = Path(top)
        relative = here.relative_to(folder)

        def stays(name: str, relative: Path = relative) -> bool:
            path = str(relative / name)
            return name.startswith(".") or any(
                fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(path, pattern.lstrip("/"))
                for pattern in patterns
            )

        folders[:] = [
            name
            for name in sorted(folders)
            if not stays(name)
            and name != "ray_results"
            and not (here / name / "pyvenv.cfg").exists()
            and (here / name).resolve() != results
        ]
        for name in sorted(names):
            file = here / name
            if not stays(name) and file.is_file():
                found[str(Path(under) / relative / name)] = file
    return found


def stage(files: dict[str, Path], folder: Path) -> None:
    """Put the files into `folder` as they will lie in the working directory: by links where possible."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, file in files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(file.resolve(), target)
        except OSError:  # another file system
            shutil.copy2(file, target)
    folder.mkdir(parents=True, exist_ok=True)
