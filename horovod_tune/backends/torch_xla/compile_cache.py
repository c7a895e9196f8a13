"""Runs in each rank: keeps on disk, for later processes, the graphs that torch_xla compiles.

torch_xla 2.9 keeps an executable in a file named after the hash of its graph, of the compiler's flags, and of
the device's topology and libtpu (`PersistentCache` and `hash_comp_env` in its sources). It writes that file
in place, without a lock, so that a reader may find it incomplete. Therefore each chip of each host has its
own directory: libtpu's lock gives a chip, and with it the directory, to one process at a time.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# A directory, or `off`. torch_xla's own XLA_PERSISTENT_CACHE_PATH takes precedence.
VARIABLE = "HOROVOD_TUNE_XLA_CACHE"
# The size limit of a chip's directory when a process starts; least recently used files are deleted first.
LIMIT_BYTES = 2 << 30


def directory_of(
    environ: Mapping[str, str], *, device: str, host: str, chip: str, version: str
) -> Path | None:
    """Return the directory for a chip's compiled graphs; None if this package must not choose one.

    Args:
        environ: the environment variables of the process.
        device: as torch_xla names it. Its CPU device can write executables but not read them (`Deserializing
            serialized executable not supported`), so it has no directory unless the variable names one.
        version: the version of torch_xla; another one may compile the same graph differently.

    Raises:
        ValueError: the variable is neither an absolute path nor `off`.
    """
    if environ.get("XLA_PERSISTENT_CACHE_PATH"):
        return None
    asked = environ.get(VARIABLE, "")
    if asked == "off" or (device == "CPU" and not asked):
        return None
    if asked and not os.path.isabs(asked):
        raise ValueError(f"{VARIABLE} must be an absolute path or 'off', got {asked!r}")
    caches = environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(caches):  # the XDG specification: a relative path is ignored
        caches = os.path.join(environ.get("HOME") or Path.home(), ".cache")
    base = Path(asked) if asked else Path(caches, "horovod_tune", "xla")
    return base / version / host / f"chip-{chip}"


def make_room(directory: Path, limit_bytes: int = LIMIT_BYTES) -> None:
    """Make the directory, readable only by this user; delete its least recently used files beyond the limit.

    Raises:
        OSError: the directory cannot be made.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    files = {path: path.stat() for path in directory.iterdir() if path.is_file()}
    total = sum(status.st_size for status in files.values())
    for path, status in sorted(files.items(), key=lambda file: max(file[1].st_atime, file[1].st_mtime)):
        if total <= limit_bytes:
            return
        path.unlink(missing_ok=True)
        total -= status.st_size
