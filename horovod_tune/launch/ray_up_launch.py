"""A launch on a cluster that `ray up` brings up (machines of one's own, or a cloud's), or that is up already.

    checked ─► up ─► submitted ─► over ─► fetched ─► down

Up to `submitted` an interrupt takes the cluster down; from then on the job does not need this machine, and an
interrupt only ends the showing. The cluster goes down after its results are here, or in a bucket.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horovod_tune.launch import host_claims
from horovod_tune.launch.cluster_head import head_of
from horovod_tune.launch.console import run_logged, say
from horovod_tune.launch.head_shell import Unreachable
from horovod_tune.launch.launch_record import LaunchRecord, age
from horovod_tune.launch.ray_up_end import DETACHED, attach, patiently, shell_of, take_down
from horovod_tune.launch.script import Script
from horovod_tune.launch.values import LaunchError
from horovod_tune.launch.working_dir import stage

# How long the machines may take to come and to be set up: compiling Horovod is part of it.
JOIN_TIMEOUT_S = 1800.0


def nodes_at_the_start(config: Mapping[str, Any]) -> int:
    """Return how many machines a cluster file brings up at once, the head among them.

    >>> nodes_at_the_start({"provider": {"type": "local", "head_ip": "a", "worker_ips": ["b", "c"]}})
    3
    """
    if "worker_ips" in config["provider"]:
        return 1 + int(config.get("min_workers", len(config["provider"]["worker_ips"])))
    kinds = config.get("available_node_types", {}).values()
    return 1 + sum(kind.get("min_workers", 0) for kind in kinds)


def make_token() -> None:
    """Make sure that this user has a token for Ray's clusters, and that nobody else reads it."""
    token = Path.home() / ".ray" / "auth_token"
    if not token.is_file():
        # Its standard output is the token itself.
        subprocess.run(
            ["ray", "get-auth-token", "--generate"],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    token.chmod(0o600)


def bring_up(record: LaunchRecord, config: Mapping[str, Any]) -> None:
    """Claim the machines if they are one's own, run `ray up`, and find the head.

    Raises:
        LaunchError: a machine is in use, or `ray up` failed.
    """
    make_token()
    if config["provider"]["type"] == "local":
        record.head = {
            "host": config["provider"]["head_ip"],
            "user": config["auth"]["ssh_user"],
            "key": config["auth"].get("ssh_private_key", ""),
        }
        hosts = [config["provider"]["head_ip"], *config["provider"].get("worker_ips", [])]
        record.note(hosts=hosts)
        shells = [shell_of(record, host) for host in hosts]
        host_claims.claim(shells, record.name, shlex.join(record.command), record.user)
    say(f"Bringing up {record.machines} (log: {record.log})")
    start = time.monotonic()
    record.note(phase="up")
    run_logged(["ray", "up", "-y", "--no-config-cache", record.file], record.log)
    if not record.head:
        record.head = head_of(record.file, record.log)
    record.save()
    say(f"The head is {record.head['host']}, up after {age(time.monotonic() - start)}")


def look_at_head(record: LaunchRecord) -> None:
    """Look at the head of a cluster that is up already: whether it takes a job of this launch's name.

    Raises:
        LaunchError: it lacks this package or Ray, or a job of that name ran there before.
        Unreachable: it cannot be reached.
    """
    (answer,) = shell_of(record).ask("known", record.name, timeout_s=300.0)
    if answer["known"]:
        raise LaunchError(f"{record.machines} has had a job called {record.name}: give another --name")
    record.note(phase="up")


def submit(record: LaunchRecord, script: Script, files: dict[str, Path], asked: Mapping[str, Any]) -> None:
    """Send the working directory and the job's description to the head, and submit the job there.

    Raises:
        LaunchError: the head refuses.
        Unreachable: it cannot be reached.
    """
    head = shell_of(record)
    staged = record.folder / "job"
    stage(files, staged / "work")
    job = {
        "command": script.command,
        "script": script.path.name,
        "user": record.user,
        "target": record.target,
        "join_timeout_s": JOIN_TIMEOUT_S,
        **asked,
    }
    (staged / "job.json").write_text(json.dumps(job, indent=1))
    folder = f".horovod-tune/jobs/{record.name}"
    # What an earlier job of this name has left there would be taken for this one's.
    patiently(lambda: head.run(f"mkdir -p -m 700 ~/.horovod-tune && rm -rf {folder} && mkdir -p {folder}"))
    patiently(lambda: head.copy(f"{staged}/", f":{folder}/", log=record.log))
    patiently(lambda: head.ask("submit", record.name, timeout_s=300.0))
    record.note(phase="submitted", offset=0)


def launch(
    record: LaunchRecord,
    script: Script,
    files: dict[str, Path],
    config: Mapping[str, Any] | None,
    asked: Mapping[str, Any],
) -> int:
    """Do a whole launch, the cluster file being written; return the job's exit status.

    Without a `config` the cluster is up, and `record` says how its head is reached.

    Raises:
        LaunchError: it could not be started; then nothing of it is up, or the error says so.
    """
    try:
        if config is None:
            look_at_head(record)
        else:
            bring_up(record, config)
            asked = {**asked, "nodes": nodes_at_the_start(config)}
        submit(record, script, files, asked)
    except (KeyboardInterrupt, LaunchError, Unreachable) as error:
        try:
            _undo(record)
        except LaunchError as left:
            raise LaunchError(f"{error}\n{left}") from None
        if isinstance(error, KeyboardInterrupt):
            say("Interrupted before the job was submitted; nothing has run.")
            return DETACHED
        raise error if isinstance(error, LaunchError) else LaunchError(str(error)) from None
    say(
        f"Running as {record.name}. Ctrl-C detaches; then: horovod-tune attach|logs|status|stop {record.name}"
    )
    return attach(record)


def _undo(record: LaunchRecord) -> None:
    """Nothing has run yet, so there is nothing to lose: leave nothing up."""
    if record.target == "running":
        if record.phase == "up":  # it may be submitted, and its answer lost
            with contextlib.suppress(LaunchError, Unreachable):
                shell_of(record).ask("stop", record.name, timeout_s=30.0)
        record.note(phase="down")
    elif record.phase == "up":
        take_down(record)
    else:
        if record.hosts:
            host_claims.release([shell_of(record, host) for host in record.hosts], record.name)
        record.note(phase="down")
