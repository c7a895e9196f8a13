"""Brings a job's results here, and checks that what came is what is there."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_tune.launch.head_shell import HeadShell
from horovod_tune.launch.values import LaunchError
from horovod_tune.node.head_job import checksum

ATTEMPTS = 3
# Checksums of all results are part of it.
LISTING_TIMEOUT_S = 3600.0


class ResultsMissing(LaunchError):
    """Results are on the cluster and not here; the cluster must stay."""


@dataclass(frozen=True)
class FetchPlan:
    """What is to come, and what need not."""

    # By the name that it gets here.
    folders: dict[str, dict[str, Any]]
    in_buckets: tuple[str, ...]
    problems: tuple[str, ...]


def plan_fetch(listed: Iterable[Mapping[str, Any]]) -> FetchPlan:
    """Return what to fetch of what the head lists. Two experiments of one name get a number. Pure.

    >>> plan_fetch([{"file_system": "local", "path": "/r/a", "files": {}, "complete": True}]).folders.keys()
    dict_keys(['a'])
    """
    folders: dict[str, dict[str, Any]] = {}
    buckets: list[str] = []
    problems: list[str] = []
    for entry in listed:
        if entry["files"] is None:
            uri = f"{entry['file_system']}://{entry['path']}"
            (buckets if entry["complete"] else problems).append(
                uri if entry["complete"] else f"{uri} could not be read from the cluster's head"
            )
            continue
        if not entry["complete"]:
            problems.append(f"{entry['path']} is not on the head")
            continue
        name = stem = posixpath.basename(entry["path"].rstrip("/")) or "results"
        number = 1
        while name in folders:
            number += 1
            name = f"{stem}-{number}"
        folders[name] = dict(entry)
    return FetchPlan(folders, tuple(buckets), tuple(problems))


def differences(there: Mapping[str, Sequence[Any]], here: Path) -> list[str]:
    """Return the files of a listing that are not here, or are here with another content.

    Raises:
        OSError: a file here cannot be read.
    """
    wrong = []
    for name, (size, digest) in there.items():
        file = here / name if name else here
        if not file.is_file() or file.stat().st_size != size or checksum(file) != digest:
            wrong.append(name or here.name)
    return wrong


def fetch(head: HeadShell, job: str, results: Path, log: Path, *, final: bool = True) -> list[str]:
    """Bring the results of `job` to the folder `results`; return where they are now, buckets included.

    Those of a job that still runs (not `final`) change while they come: they are not compared.

    Raises:
        Unreachable: the connection was lost.
        ResultsMissing: not all came, after several attempts.
    """
    plan = plan_fetch(head.ask("results", job, timeout_s=LISTING_TIMEOUT_S))
    results.mkdir(parents=True, exist_ok=True)
    for name, entry in plan.folders.items():
        folder = list(entry["files"]) != [""]
        wrong: list[str] = []
        for attempt in range(ATTEMPTS):
            slash = "/" if folder else ""
            head.copy(f":{entry['path']}{slash}", f"{results / name}{slash}", exact=attempt > 0, log=log)
            wrong = differences(entry["files"], results / name) if final else []
            if not wrong:
                break
        if wrong:
            raise ResultsMissing(
                f"{len(wrong)} of {len(entry['files'])} files of {entry['path']} did not arrive whole, "
                f"{wrong[0]} among them"
            )
    if final:
        if plan.problems:
            raise ResultsMissing("; ".join(plan.problems))
        head.ask("fetched", job)
    return [*(str(results / name) for name in plan.folders), *plan.in_buckets]


def check_writable(results: Path) -> None:
    """Make the folder for the results, and write to it.

    Raises:
        LaunchError: it cannot be.
    """
    try:
        results.mkdir(parents=True, exist_ok=True)
        probe = results / ".horovod-tune-probe"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise LaunchError(
            f"--results must be a folder that can be written to, got {str(results)!r}: {error}"
        ) from None
