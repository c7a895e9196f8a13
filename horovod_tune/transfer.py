"""Moves a directory between two Ray nodes that share no file system, through Ray's own channel.

Files travel in chunks from a generator task on the source node to a task on the target node, so neither side
holds more than a few chunks in memory, no port is opened, and Ray's authentication covers the way.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

CHUNK_BYTES = 8 << 20
IN_FLIGHT = 4
"""Chunks that may wait at the receiver: bounds the object store's share."""


def copy_directory(source_node: str, source: str, target_node: str, target: str, *, timeout_s: float) -> None:
    """Copy ``source`` on one Ray node to ``target`` on another; ``target`` appears whole or not at all.

    Raises:
        FileNotFoundError: ``source`` is no directory on its node.
        ray.exceptions.GetTimeoutError: the copy took longer than ``timeout_s``.
    """
    task = ray.remote(num_cpus=0, max_retries=0)(_receive).options(scheduling_strategy=_on(target_node))
    ref = task.remote(source_node, source, target)
    try:
        ray.get(ref, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        ray.cancel(ref, force=True)
        raise


def stat_directory(node: str, path: str, *, timeout_s: float) -> tuple[int, int] | None:
    """Return `fingerprint(path)` as ``node`` sees it."""
    task = ray.remote(num_cpus=0)(fingerprint).options(scheduling_strategy=_on(node))
    return ray.get(task.remote(path), timeout=timeout_s)


def fingerprint(path: str) -> tuple[int, int] | None:
    """Return what tells one directory from its namesake on another host's disk; None where there is none.

    On a shared file system every host sees the same inode number and modification time.
    """
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _on(node: str) -> NodeAffinitySchedulingStrategy:
    return NodeAffinitySchedulingStrategy(node_id=node, soft=False)


def _send(source: str) -> Iterator[tuple[str, bytes | None]]:
    """Yield (path, chunk) for every file below ``source``, and (path, None) for every directory."""
    root = Path(source)
    if not root.is_dir():
        raise FileNotFoundError(f"{source} is no directory on this node")
    for directory, _, files in os.walk(root):
        yield str(Path(directory).relative_to(root)), None
        for name in files:
            path = Path(directory, name)
            relative = str(path.relative_to(root))
            with path.open("rb") as file:
                chunk = file.read(CHUNK_BYTES)
                yield relative, chunk
                while len(chunk) == CHUNK_BYTES:
                    chunk = file.read(CHUNK_BYTES)
                    yield relative, chunk


def _receive(source_node: str, source: str, target: str) -> None:
    if source_node == ray.get_runtime_context().get_node_id():
        chunks: Iterator[Any] = _send(source)
    else:
        sender: Any = ray.remote(num_cpus=0, max_retries=0)(_send)
        refs = sender.options(
            num_returns="streaming",
            _generator_backpressure_num_objects=IN_FLIGHT,
            scheduling_strategy=_on(source_node),
        ).remote(source)
        chunks = (ray.get(ref) for ref in refs)
    part = f"{target}.{uuid.uuid4().hex}.part"
    try:
        for relative, chunk in chunks:
            path = Path(part, relative)
            if chunk is None:
                path.mkdir(parents=True, exist_ok=True)
            else:
                with path.open("ab") as file:
                    file.write(chunk)
        _replace(part, target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _replace(part: str, target: str) -> None:
    """Put ``part`` where ``target`` is, merging into a directory that is there already."""
    try:
        os.rename(part, target)
    except OSError:
        shutil.copytree(part, target, dirs_exist_ok=True)
