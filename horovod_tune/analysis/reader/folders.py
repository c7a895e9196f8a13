"""An experiment's folder wherever it lies: a local path or any URI that Tune's storage takes (pyarrow.fs)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyarrow import fs as pafs

_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://")


@dataclass(frozen=True)
class Entry:
    """One file or folder directly below another; `modified` is Unix time in seconds, None where not known."""

    name: str
    is_dir: bool
    size: int
    modified: float | None


@dataclass(frozen=True)
class Folder:
    """A folder of a pyarrow filesystem; `shown` is how a person writes its place."""

    filesystem: pafs.FileSystem
    path: str
    shown: str

    def below(self, name: str) -> Folder:
        place, mark, query = self.shown.partition("?") if "://" in self.shown else (self.shown, "", "")
        shown = f"{place.rstrip('/')}/{name}{mark}{query}"  # s3://bucket/experiment?region=eu-west-1
        return Folder(self.filesystem, f"{self.path.rstrip('/')}/{name}", shown)

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rsplit("/", 1)[-1]

    def entries(self) -> list[Entry]:
        """What lies directly in the folder, sorted by name; empty where the folder does not exist."""
        selector = pafs.FileSelector(self.path, recursive=False, allow_not_found=True)
        found = []
        for info in self.filesystem.get_file_info(selector):
            modified = info.mtime.timestamp() if info.mtime is not None else None
            found.append(
                Entry(info.base_name, info.type == pafs.FileType.Directory, info.size or 0, modified)
            )
        return sorted(found, key=lambda entry: entry.name)

    def exists(self) -> bool:
        return self.filesystem.get_file_info(self.path).type == pafs.FileType.Directory

    def read(self, name: str) -> bytes | None:
        """A file's bytes, or None where there is no such file."""
        try:
            with self.filesystem.open_input_stream(
                f"{self.path.rstrip('/')}/{name}", compression=None
            ) as stream:
                return stream.readall()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None

    def size(self, name: str) -> int:
        """A file's size in bytes; 0 where there is no such file."""
        return self.filesystem.get_file_info(f"{self.path.rstrip('/')}/{name}").size or 0


def open_folder(place: str | os.PathLike[str], filesystem: Any = None) -> Folder:
    """Return the folder at a local path or a URI.

    With `filesystem` (a pyarrow filesystem, as `RunConfig(storage_filesystem=…)` takes it), `place` is a path
    on that filesystem. Raises `FileNotFoundError` where there is no such folder, and `ValueError` for a URI
    that pyarrow does not know.
    """
    text = os.fspath(place)
    if filesystem is not None:
        folder = Folder(filesystem, text.rstrip("/") or "/", text)
    elif _SCHEME.match(text) and not text.startswith(("file://", "local://")):
        resolved, path = pafs.FileSystem.from_uri(text)  # as Tune resolves its storage_path
        folder = Folder(resolved, path.rstrip("/"), text)
    else:
        local = Path(re.sub(r"^(file|local)://", "", text)).expanduser().absolute()
        folder = Folder(pafs.LocalFileSystem(), local.as_posix(), local.as_posix())
    if not folder.exists():
        raise FileNotFoundError(f"there is no folder at {folder.shown!r}")
    return folder


def driver_folders(experiment: str) -> list[Folder]:
    """Return where a driver on this machine stages an experiment of this name, the newest first.

    Tune writes there first and copies to the experiment's own folder every few minutes and at the end: what
    runs, or was killed, has its latest results there only.
    """
    roots = [os.environ.get("RAY_TMPDIR"), os.environ.get("RAY_TEMP_DIR"), "/tmp/ray"]
    found: dict[str, float] = {}
    for root in roots:
        if not root:
            continue
        for base in (Path(root), Path(root) / "ray"):
            for path in base.glob("session_2*/artifacts/*/*/driver_artifacts"):
                if path.parent.name != experiment or not os.access(path, os.R_OK | os.X_OK):
                    continue
                found[path.resolve().as_posix()] = path.stat().st_mtime
    newest_first = sorted(found, key=lambda path: -found[path])
    return [Folder(pafs.LocalFileSystem(), path, path) for path in newest_first]
