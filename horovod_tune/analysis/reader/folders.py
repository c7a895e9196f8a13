"""An experiment's folder: a local path or any URI that Tune's storage takes (pyarrow.fs).

A folder may come from an untrusted source. Only regular files of limited size are read, and no link is
followed out of the folder.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from pyarrow import fs as pafs

_SCHEME = re.compile(r"^[A-Za-z][A-Za-z0-9+.-]+://")
LARGEST = 256 * 2**20  # bytes of one file: a million reports, which still fit into memory as JSON


class UnusableFile(OSError):
    """Raised for an existing file that must not be read; the text has the reason."""


@dataclass(frozen=True)
class Entry:
    """One file or folder directly in another; `modified` is Unix time in seconds, None if not known.

    `odd_name` is True if the name is not UTF-8; `name` is then escaped, and nothing can open it.
    """

    name: str
    is_dir: bool
    modified: float | None
    odd_name: bool = False


@dataclass(frozen=True)
class Folder:
    """A folder of a pyarrow filesystem; `shown` is its path or URI as a user writes it.

    Links may not lead out of `top`, the experiment's folder (by default this one). `staged` is the copy that
    the experiment's driver writes first; if a file is in both, the driver's is read.
    """

    filesystem: pafs.FileSystem
    path: str
    shown: str
    top: str | None = None
    staged: Folder | None = None

    def below(self, name: str) -> Folder:
        place, mark, query = self.shown.partition("?") if "://" in self.shown else (self.shown, "", "")
        shown = f"{place.rstrip('/')}/{name}{mark}{query}"  # s3://bucket/experiment?region=eu-west-1
        staged = self.staged.below(name) if self.staged is not None else None
        return Folder(self.filesystem, self._inside(name), shown, self.top or self.path, staged)

    def _inside(self, name: str) -> str:
        return f"{self.path.rstrip('/')}/{name}"

    @property
    def name(self) -> str:
        return self.path.rstrip("/").rsplit("/", 1)[-1]

    def entries(self) -> list[Entry]:
        """Return the entries directly in the folder and in its staged copy; empty if there is neither."""
        listed = self.staged.entries() if self.staged is not None else []
        local = _on_this_machine(self.filesystem, self.path)
        if local is not None:
            listed += self._local_entries(local)
        else:
            selector = pafs.FileSelector(self.path, recursive=False, allow_not_found=True)
            for info in self.filesystem.get_file_info(selector):
                modified = info.mtime.timestamp() if info.mtime is not None else None
                listed.append(Entry(info.base_name, info.type == pafs.FileType.Directory, modified))
        return sorted(listed, key=lambda entry: entry.name)

    def _local_entries(self, local: str) -> Iterator[Entry]:
        # Within an experiment, a folder that may not be listed (`lost+found`) counts as empty.
        passed = (OSError,) if self.top is not None else (FileNotFoundError, NotADirectoryError)
        with suppress(*passed), os.scandir(local) as listed:
            for item in listed:
                stays = not item.is_symlink() or self._stays_inside(item.path)
                text = os.fsencode(item.name).decode("utf-8", "backslashreplace")
                with suppress(FileNotFoundError):  # removed since it was listed
                    modified = item.stat(follow_symlinks=False).st_mtime
                    yield Entry(text, stays and os.path.isdir(item.path), modified, text != item.name)

    def read(self, name: str) -> bytes | None:
        """Return a file's bytes, or None if there is no such file.

        Raises:
            UnusableFile: the file is too large, not a regular file, or a link that leads outside.
        """
        if self.staged is not None and (data := self.staged.read(name)) is not None:
            return data
        local = _on_this_machine(self.filesystem, self._inside(name))
        try:
            if local is not None:
                return self._read_local(local)
            _refuse_larger(self.filesystem.get_file_info(self._inside(name)).size or 0)
            with self.filesystem.open_input_stream(self._inside(name), compression=None) as stream:
                return stream.readall()
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None

    def _read_local(self, local: str) -> bytes:
        if not self._stays_inside(local):
            raise UnusableFile("a link that leads out of the experiment's folder")
        if os.path.isdir(local):
            raise IsADirectoryError(local)
        if not stat.S_ISREG(os.lstat(os.path.realpath(local)).st_mode):  # opening a device may have effects
            raise UnusableFile("not a regular file")
        # No link is followed and no pipe is waited for: the file may have been replaced since.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.path.realpath(local), "rb", opener=lambda path, _: os.open(path, flags)) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise UnusableFile("not a regular file")
            _refuse_larger(status.st_size)
            return file.read(LARGEST + 1)

    def _stays_inside(self, local: str) -> bool:
        top = os.path.realpath(_on_this_machine(self.filesystem, self.top or self.path) or "/")
        return os.path.commonpath([top, os.path.realpath(local)]) == top


def _on_this_machine(filesystem: Any, path: str) -> str | None:
    """Return the local path of a path on a pyarrow filesystem; None if the filesystem is not local."""
    while isinstance(filesystem, pafs.SubTreeFileSystem):
        path = f"{filesystem.base_path.rstrip('/')}/{path.lstrip('/')}"
        filesystem = filesystem.base_fs
    return path if isinstance(filesystem, pafs.LocalFileSystem) else None


def has_uri(filesystem: pafs.FileSystem) -> bool:
    """Return True if a filesystem has URIs; local ones, those made in Python and subtrees have none."""
    return filesystem.type_name not in ("local", "subtree") and "::" not in filesystem.type_name


def shown_place(filesystem: pafs.FileSystem, path: str) -> str:
    """Return a path of a filesystem as a user writes it: as a URI if the filesystem has one.

    >>> shown_place(pafs.LocalFileSystem(), "/results/digits")
    '/results/digits'
    """
    return f"{filesystem.type_name}://{quote(path)}" if has_uri(filesystem) else path


def _refuse_larger(size: int) -> None:
    if size > LARGEST:
        raise UnusableFile(f"larger than {LARGEST:,} bytes: {size:,}")


def open_folder(place: str | os.PathLike[str], filesystem: Any = None) -> Folder:
    """Return the folder at a local path or a URI.

    With `filesystem` (a pyarrow filesystem, as `RunConfig(storage_filesystem=…)` takes it), `place` is a path
    on that filesystem. Raises `FileNotFoundError` if there is no such folder, and `ValueError` for "" or
    a URI that pyarrow does not know.
    """
    text = os.fspath(place)
    if not text and filesystem is None:
        raise ValueError(f"experiment must be a folder, got {text!r}")
    if filesystem is not None:
        folder = Folder(filesystem, text.rstrip("/") or "/", text)
    elif _SCHEME.match(text) and not text.startswith(("file://", "local://")):
        resolved, path = pafs.FileSystem.from_uri(text)  # as Tune resolves its storage_path
        folder = Folder(resolved, path.rstrip("/"), text)
    else:
        uri = _SCHEME.match(text)
        local = Path(unquote(text[uri.end() :]) if uri else text).expanduser().absolute()
        folder = Folder(pafs.LocalFileSystem(), local.as_posix(), local.as_posix())
    if folder.filesystem.get_file_info(folder.path).type != pafs.FileType.Directory:
        raise FileNotFoundError(f"there is no folder at {folder.shown!r}")
    return folder


def driver_folders(experiment: str) -> list[Folder]:
    """Return where drivers on this machine staged experiments of this name, newest first.

    Tune copies from there to the experiment's own folder every few minutes and at the end.
    """
    roots = [os.environ.get("RAY_TMPDIR"), os.environ.get("RAY_TEMP_DIR"), "/tmp/ray"]
    modified: dict[str, float] = {}
    for base in (base for root in roots if root for base in (Path(root), Path(root) / "ray")):
        for path in base.glob("session_2*/artifacts/*/*/driver_artifacts"):
            if path.parent.name == experiment and os.access(path, os.R_OK | os.X_OK):
                modified[path.resolve().as_posix()] = path.stat().st_mtime
    newest_first = sorted(modified, key=lambda path: -modified[path])
    return [Folder(pafs.LocalFileSystem(), path, path) for path in newest_first]
