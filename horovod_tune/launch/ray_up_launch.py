"""A launch on a cluster that `ray up` brings up: machines of one's own, or a cloud's.

    checked ─► up ─► submitted ─► over ─► fetched ─► down

Up to `submitted` an interrupt takes the cluster down; from then on the job does not need this machine, and an
interrupt only ends the showing. The cluster goes down after its results are here, or in a bucket.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horovod_tune.launch import fetching, host_claims
from horovod_tune.launch.console import StepFailed, run_logged, say
from horovod_tune.launch.following import follow
from horovod_tune.launch.head_shell import HeadShell, Unreachable
from horovod_tune.launch.launch_record import LaunchRecord, age
from horovod_tune.launch.script import Script
from horovod_tune.launch.values import LaunchError
from horovod_tune.launch.working_dir import stage

# How long the machines may take to come and to be set up: compiling Horovod is part of it.
JOIN_TIMEOUT_S = 1800.0
# Exit status when an interrupt ended the showing: the job's own is not known yet.
DETACHED = 130
# How long a command that needs the head tries to reach it.
CONTACT_S = 120.0


def nodes_at_the_start(config: Mapping[str, Any]) -> int:
    """Return how many machines a cluster file brings up at once, the head among them.

    >>> nodes_at_the_start({"provider": {"type": "local", "head_ip": "a", "worker_ips": ["b", "c"]}})
    3
    """
    if "worker_ips" in config["provider"]:
        return 1 + int(config.get("min_workers", len(config["provider"]["worker_ips"])))
    kinds = config.get("available_node_types", {}).values()
    return 1 + sum(kind.get("min_workers", 0) for kind in kinds)


def shell_of(record: LaunchRecord, host: str | None = None) -> HeadShell:
    """Return the way to the head of a launch, or to another of its machines."""
    if not record.head:
        raise LaunchError(f"{record.name} has no head yet: its log is {record.log}")
    return HeadShell(
        host or record.head["host"],
        record.head["user"],
        record.head.get("key", ""),
        str(record.folder / "known_hosts"),
    )


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
        record.head = _head_of(record.file)
    record.save()
    say(f"The head is {record.head['host']}, up after {age(time.monotonic() - start)}")


def _head_of(file: str) -> dict[str, str]:
    """Return how the head of a cloud's cluster is reached, as Ray does it."""
    import yaml
    from ray.autoscaler import sdk

    config = sdk.bootstrap_config(sdk.fillout_defaults(yaml.safe_load(Path(file).read_text())))
    auth = config["auth"]
    return {
        "host": sdk.get_head_node_ip(file),
        "user": auth["ssh_user"],
        "key": auth.get("ssh_private_key", ""),
    }


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
        "join_timeout_s": JOIN_TIMEOUT_S,
        **asked,
    }
    (staged / "job.json").write_text(json.dumps(job, indent=1))
    folder = f".horovod-tune/jobs/{record.name}"
    _patiently(lambda: head.run(f"mkdir -p -m 700 ~/.horovod-tune && mkdir -p {folder}"))
    _patiently(lambda: head.copy(f"{staged}/", f":{folder}/", log=record.log))
    _patiently(lambda: head.ask("submit", record.name, timeout_s=300.0))
    record.note(phase="submitted", offset=0)


def attach(record: LaunchRecord) -> int:
    """Follow a submitted job to its end, then bring its results and take the cluster down.

    Returns the job's exit status; an interrupt detaches.
    """
    try:
        if record.phase == "submitted":
            ended = _follow(record)
            record.note(phase="over", exit_code=exit_code_of(ended))
            say(f"The job is over: {ended['status'].lower()}, exit status {record.exit_code}")
            if ended["status"] != "SUCCEEDED" and ended.get("message"):
                say(ended["message"].strip().splitlines()[0])
        if record.phase == "over":
            bring_results(record)
        if record.phase == "fetched" and not record.keep_up:
            take_down(record)
    except KeyboardInterrupt:
        say(f"\nDetached: {record.name} goes on without this machine{_autostop_words(record)}.")
        say(f"Come back: horovod-tune attach {record.name}    Stop it: horovod-tune stop {record.name}")
        return DETACHED
    if record.keep_up and record.phase == "fetched":
        say(f"The cluster stays up ({record.machines}). Take it down: horovod-tune down {record.name}")
    return record.exit_code or 0


def _follow(record: LaunchRecord) -> dict[str, Any]:
    try:
        return follow(
            lambda offset: shell_of(record).stream("follow", record.name, "--offset", str(offset)),
            offset=record.offset,
            note=lambda offset: record.note(offset=offset),
        )
    except LaunchError as error:
        raise LaunchError(
            f"{error}\nThe cluster stays up ({record.machines}). Again: horovod-tune attach {record.name}    "
            f"Give it up: horovod-tune down --lose-results {record.name}"
        ) from None


def exit_code_of(ended: Mapping[str, Any]) -> int:
    """Return the exit status of a job that is over, as a shell would give it.

    >>> exit_code_of({"status": "FAILED", "exit_code": None})
    1
    >>> exit_code_of({"status": "FAILED", "exit_code": 3})
    3
    """
    code = ended.get("exit_code")
    if code is None:
        return 0 if ended["status"] == "SUCCEEDED" else 1
    return 128 - code if code < 0 else int(code)


def _autostop_words(record: LaunchRecord) -> str:
    if not record.autostop_min:
        return ""
    return f"; if nobody fetches its results, the cluster ends {age(record.autostop_min * 60)} after the job"


def bring_results(record: LaunchRecord) -> None:
    """Fetch and check the results; the cluster stays up where that cannot be done.

    Raises:
        LaunchError: results are missing; says what stays up and how to go on.
    """
    try:
        where = _patiently(
            lambda: fetching.fetch(shell_of(record), record.name, Path(record.results), record.log)
        )
    except (LaunchError, Unreachable, OSError) as error:
        raise LaunchError(
            f"the results could not be fetched: {error}\nThe cluster stays up ({record.machines}, for "
            f"{age(time.time() - record.created_s)} now{_autostop_words(record)}).\n"
            f"Again: horovod-tune fetch {record.name}    "
            f"Without them: horovod-tune down --lose-results {record.name}"
        ) from None
    record.note(phase="fetched")
    say(f"The results are in {', '.join(where)}")


def _patiently(do: Any) -> Any:
    """Do something that needs the head, through lost connections, for `CONTACT_S`."""
    deadline, told = time.monotonic() + CONTACT_S, False
    while True:
        try:
            return do()
        except Unreachable as lost:
            if time.monotonic() > deadline:
                raise
            if not told:
                say(f"[reconnecting… {lost}]")
            told = True
            time.sleep(2.0)


def take_down(record: LaunchRecord) -> None:
    """Take the cluster down and give the machines back.

    Raises:
        LaunchError: it may still be up; says what to type.
    """
    if record.phase == "down":
        return
    try:
        if record.head:
            try:
                shell_of(record).run("python -m horovod_tune.node.autostop --cancel", timeout_s=60)
            except (Unreachable, LaunchError) as error:
                _log(record, f"autostop --cancel: {error}")  # a head that is not set up yet, or ended itself
        run_logged(["ray", "down", "-y", record.file], record.log)
    except StepFailed as error:
        raise LaunchError(f"{error}\nThe cluster may still be up: horovod-tune down {record.name}") from None
    if record.hosts:
        host_claims.release([shell_of(record, host) for host in record.hosts], record.name)
    record.note(phase="down")
    say(f"The cluster is down: {record.machines}, for {age(time.time() - record.created_s)}")


def _log(record: LaunchRecord, line: str) -> None:
    with record.log.open("a") as lines:
        lines.write(line + "\n")


def launch(
    record: LaunchRecord,
    script: Script,
    files: dict[str, Path],
    config: Mapping[str, Any],
    asked: Mapping[str, Any],
) -> int:
    """Do a whole launch, the cluster file being written; return the job's exit status.

    Raises:
        LaunchError: it could not be started; then nothing of it is up, or the error says so.
    """
    try:
        bring_up(record, config)
        submit(record, script, files, {**asked, "nodes": nodes_at_the_start(config)})
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
    if record.phase == "up":
        take_down(record)
    else:
        if record.hosts:
            host_claims.release([shell_of(record, host) for host in record.hosts], record.name)
        record.note(phase="down")
