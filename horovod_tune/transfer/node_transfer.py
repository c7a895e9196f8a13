"""Copies directories between two Ray nodes that share no file system, through Ray itself.

The calling process reads or writes on its own node; on the other node, an actor does. All processes of a job
share one actor per node. Tasks would be slower: on a node without CPUs, Ray keeps no Python process ready, so
each task would have to wait for a new one. The actor takes no CPU and ends with the process that created it,
or with the job; a process that finds it gone creates another.

Files are sent in chunks, a few at a time. No port is opened, and Ray's authentication applies.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from horovod_tune.files import directories
from horovod_tune.files.directories import Piece

CHUNK_BYTES = 8 << 20
# The most chunks in transit, which bounds their share of the object store.
IN_FLIGHT = 4
CALLS_AT_ONCE = 8
# How many actors a copy may use in turn, since an actor may end with the process that created it.
NEW_ACTORS = 4

Result = TypeVar("Result")
# Calls a function with these arguments, on this node or another, and returns its result.
Call = Callable[..., Any]


class NodeFiles:
    """The files of one node, for the job's processes on other nodes. Runs in its own actor."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


def begin(node: str) -> Any:
    """Return the actor for the files of ``node``, created if there is none; does not wait for it."""
    key = (ray.get_runtime_context().get_job_id(), node)
    if key not in _actors:
        actor: Any = ray.remote(NodeFiles)
        _actors[key] = actor.options(
            name=f"horovod_tune_files_{key[0]}_{node}",
            get_if_exists=True,
            num_cpus=0,
            max_concurrency=CALLS_AT_ONCE,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
        ).remote()
    return _actors[key]


# By job and node. Ray ends an actor when the process that created it no longer holds a handle.
_actors: dict[tuple[str, str], Any] = {}


def _with_actor(node: str, timeout_s: float, work: Callable[[Call], Result]) -> Result:
    """Return ``work(there)``; repeat it if the actor has ended with another process.

    ``there`` calls functions on ``node``, and raises GetTimeoutError after ``timeout_s`` in all.
    """
    end = time.monotonic() + timeout_s

    def there(function: Callable[..., Any], *arguments: Any) -> Any:
        ref = begin(node).call.remote(function, *arguments)
        return ray.get(ref, timeout=max(0.0, end - time.monotonic()))

    for attempt in range(NEW_ACTORS):
        try:
            return work(there)
        except (ActorDiedError, ActorUnavailableError):
            _actors.pop((ray.get_runtime_context().get_job_id(), node), None)
            alive = any(each["NodeID"] == node and each["Alive"] for each in ray.nodes())
            if not alive or attempt == NEW_ACTORS - 1:
                raise
            time.sleep(0.2 * 2**attempt)  # until Ray has freed its name
    raise AssertionError("the last attempt returns or raises")


def _here(function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _copy(source: str, at_source: Call, target: str, at_target: Call) -> None:
    listed = at_source(directories.entries, source)
    part = f"{target}.{uuid.uuid4().hex}.part"

    def copy_chunk(chunk: list[Piece]) -> None:
        at_target(directories.write, part, chunk, at_source(directories.read, source, chunk))

    try:
        at_target(directories.make, part, listed)
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            list(pool.map(copy_chunk, directories.pieces(listed, CHUNK_BYTES)))
        at_target(directories.put_in_place, part, target)
    except BaseException:
        with contextlib.suppress(Exception):  # it must not hide the cause
            at_target(directories.discard, part)
        raise


def send_directory(source: str, node: str, target: str, *, timeout_s: float) -> None:
    """Copy a directory of this node to ``target`` on ``node``, where it appears whole or not at all.

    Raises:
        FileNotFoundError: ``source`` is not a directory.
        MetricsError: it holds something that cannot be copied.
        ray.exceptions.GetTimeoutError: the copy took longer than ``timeout_s``.
    """
    _with_actor(node, timeout_s, lambda there: _copy(source, _here, target, there))


def fetch_directory(node: str, source: str, target: str, *, timeout_s: float) -> None:
    """Copy ``source`` of ``node`` to a directory of this node, which appears whole or not at all.

    Raises: as `send_directory`, with ``source`` on its node.
    """
    _with_actor(node, timeout_s, lambda there: _copy(source, there, target, _here))


def call_on(node: str, function: Callable[..., Result], *arguments: Any, timeout_s: float) -> Result:
    """Call a function on ``node`` and return its result."""
    return _with_actor(node, timeout_s, lambda there: there(function, *arguments))
