"""Copies checkpoint directories: symbolic links are followed, and a copy is complete or absent."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from horovod_tune.errors import MetricsError


class Entry(NamedTuple):
    """A file or directory below a root: its relative path, its size (None: a directory), its mode.

    ``link`` is the target of a broken symbolic link.
    """

    path: str
    size: int | None
    mode: int
    link: str = ""


class Piece(NamedTuple):
    """Some bytes of a file below a root."""

    path: str
    offset: int
    length: int


def entries(root: str) -> list[Entry]:
    """Return everything below ``root``, each directory before its contents, the root itself first.

    A symbolic link is replaced by its target, which another host may not have; a broken link stays a link.

    Raises:
        FileNotFoundError: ``root`` is not a directory.
        MetricsError: a link points to a directory that contains it, or there is a socket, a pipe or a device.
    """
    if not os.path.isdir(root):
        raise FileNotFoundError(f"{root} is not a directory on this host")
    return list(_below(root, "", ()))


def _below(root: str, path: str, above: tuple[tuple[int, int], ...]) -> Iterator[Entry]:
    directory = os.path.join(root, path)
    status = os.stat(directory)
    identity = (status.st_dev, status.st_ino)
    if identity in above:
        raise MetricsError(f"{directory} is a symbolic link to a directory that contains it")
    yield Entry(path, None, stat.S_IMODE(status.st_mode))
    for name in sorted(os.listdir(directory)):
        inner = os.path.join(path, name)
        try:
            status = os.stat(os.path.join(root, inner))
        except OSError:
            if not os.path.islink(os.path.join(root, inner)):
                raise
            yield Entry(inner, 0, 0o777, os.readlink(os.path.join(root, inner)))
            continue
        if stat.S_ISDIR(status.st_mode):
            yield from _below(root, inner, (*above, identity))
        elif stat.S_ISREG(status.st_mode):
            yield Entry(inner, status.st_size, stat.S_IMODE(status.st_mode))
        else:
            raise MetricsError(
                f"the checkpoint {root} contains {inner!r}, which is a socket, a pipe or a device; a "
                "checkpoint can contain only files and directories"
            )


def pieces(found: Iterable[Entry], most_bytes: int) -> Iterator[Piece]:
    """Yield the files of ``found`` in pieces of at most ``most_bytes`` bytes.

    >>> [tuple(piece) for piece in pieces([Entry("", None, 0o755), Entry("a", 5, 0o644)], 4)]
    [('a', 0, 4), ('a', 4, 1)]
    """
    for entry in found:
        size = entry.size or 0
        for offset in range(0, size, most_bytes):
            yield Piece(entry.path, offset, min(most_bytes, size - offset))


def read(root: str, piece: Piece) -> bytes:
    """Return the bytes of a piece; OSError if the file has become shorter since it was listed."""
    path = os.path.join(root, piece.path)
    with open(path, "rb") as file:
        file.seek(piece.offset)
        content = file.read(piece.length)
    if len(content) != piece.length:
        raise OSError(f"{path} was changed while it was copied")
    return content


def make(root: str, found: Iterable[Entry]) -> None:
    """Make directories and empty files for ``found`` below ``root``."""
    for entry in found:
        path = os.path.join(root, entry.path)
        if entry.size is None:
            # Writable even if the original is not, since its files are written later.
            os.makedirs(path, exist_ok=True)
            os.chmod(path, entry.mode | stat.S_IRWXU)
        elif entry.link:
            os.symlink(entry.link, path)
        else:
            os.close(
                os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, entry.mode | stat.S_IRUSR | stat.S_IWUSR)
            )


def write(root: str, piece: Piece, content: bytes) -> None:
    """Write a piece into the file that `make` created."""
    with open(os.path.join(root, piece.path), "r+b") as file:
        file.seek(piece.offset)
        file.write(content)


def copy(source: str, target: str) -> None:
    """Copy a directory of this host; ``target`` appears whole or not at all, and replaces an earlier one.

    Raises:
        MetricsError: ``source`` contains ``target``, or something that cannot be copied.
    """
    inside = os.path.realpath(target)
    if os.path.commonpath([inside, os.path.realpath(source)]) == os.path.realpath(source):
        raise MetricsError(f"the directory {source} cannot be a checkpoint: it contains the trial's storage")
    part = f"{target}.part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        found = entries(source)
        make(part, found)
        for entry in found:
            if entry.size is not None and not entry.link:
                shutil.copy2(os.path.join(source, entry.path), os.path.join(part, entry.path))
        put_in_place(part, target)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def put_in_place(part: str, target: str) -> None:
    """Rename ``part``, which is complete, to ``target``."""
    if os.path.isdir(target):
        shutil.rmtree(target)
    os.makedirs(os.path.dirname(target), exist_ok=True)
    os.rename(part, target)


def remove_parts(directory: str) -> None:
    """Remove the partial checkpoints that killed processes left in a trial's directory."""
    for part in Path(directory).glob("checkpoint_*.part"):
        shutil.rmtree(part, ignore_errors=True)


def fingerprint(path: str) -> tuple[int, int] | None:
    """Return what distinguishes a directory from one at the same path on another host; None if it is missing.

    On a shared file system every host sees the same inode number and modification time.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns
