"""Copies checkpoint directories: symbolic links are followed, and a copy is complete or absent."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from horovod_tune.errors import MetricsError

# Packed, since between hosts a call for each small file takes about ten times as long.
_PIECES_AT_ONCE = 1000


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


def pieces(listed: Iterable[Entry], chunk_bytes: int) -> Iterator[list[Piece]]:
    """Yield chunks of at most ``chunk_bytes`` bytes: pieces of a large file, or many small files.

    >>> listed = [Entry("", None, 0o755), Entry("a", 5, 0o644), Entry("b", 1, 0o644)]
    >>> [[tuple(piece) for piece in chunk] for chunk in pieces(listed, 4)]
    [[('a', 0, 4)], [('a', 4, 1), ('b', 0, 1)]]
    """
    chunk: list[Piece] = []
    room = chunk_bytes
    for entry in listed:
        offset = 0
        while offset < (entry.size or 0):
            length = min(room, (entry.size or 0) - offset)
            chunk.append(Piece(entry.path, offset, length))
            offset, room = offset + length, room - length
            if not room or len(chunk) == _PIECES_AT_ONCE:
                yield chunk
                chunk, room = [], chunk_bytes
    if chunk:
        yield chunk


def read(root: str, chunk: Iterable[Piece]) -> list[bytes]:
    """Return the bytes of each piece; OSError if a file has become shorter since it was listed."""
    contents = []
    for piece in chunk:
        with open(os.path.join(root, piece.path), "rb") as file:
            file.seek(piece.offset)
            contents.append(file.read(piece.length))
        if len(contents[-1]) != piece.length:
            raise OSError(f"{os.path.join(root, piece.path)} was changed while it was copied")
    return contents


def make(root: str, listed: Iterable[Entry]) -> None:
    """Make directories and empty files for ``listed`` below ``root``."""
    for entry in listed:
        path = os.path.join(root, entry.path)
        if entry.size is None:
            # Writable even if the original is not, since its files are written later.
            # Only the root is made with its parents: after `discard`, a late call makes nothing below it.
            os.mkdir(path) if entry.path else os.makedirs(path, exist_ok=True)
            os.chmod(path, entry.mode | stat.S_IRWXU)
        elif entry.link:
            os.symlink(entry.link, path)
        else:
            os.close(
                os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, entry.mode | stat.S_IRUSR | stat.S_IWUSR)
            )


def write(root: str, chunk: Iterable[Piece], contents: Iterable[bytes]) -> None:
    """Write pieces into the files that `make` created."""
    for piece, content in zip(chunk, contents, strict=True):
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
        listed = entries(source)
        make(part, listed)
        for entry in listed:
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


def discard(part: str) -> None:
    """Remove ``part``; calls of `make`, `write` and `put_in_place` that still run fail and leave nothing."""
    gone = f"{part}.part"
    os.rename(part, gone)
    shutil.rmtree(gone, ignore_errors=True)


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
