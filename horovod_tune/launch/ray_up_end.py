"""What follows a submitted job, from any terminal: its output, its results, the end of its cluster."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from horovod_tune.launch import fetching, host_claims
from horovod_tune.launch.console import StepFailed, run_logged, say
from horovod_tune.launch.following import follow
from horovod_tune.launch.head_shell import HeadShell, Unreachable
from horovod_tune.launch.launch_record import LaunchRecord, age
from horovod_tune.launch.values import LaunchError

T = TypeVar("T")
# Ray's words for a job that is not over.
RUNNING = ("pending", "running")
# Exit status when an interrupt ended the showing: the job's own is not known yet.
DETACHED = 130
# How long a command that needs the head tries to reach it.
CONTACT_S = 120.0


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


def attach(record: LaunchRecord) -> int:
    """Follow a submitted job to its end, then bring its results and take the cluster down.

    Returns the job's exit status; an interrupt detaches.

    Raises:
        LaunchError: there is nothing to follow, or its results cannot be fetched.
    """
    if record.phase in ("new", "up"):
        raise LaunchError(
            f"{record.name} was interrupted before its job was submitted (log: {record.log}). "
            f"End what is up: horovod-tune down {record.name}"
        )
    if record.phase == "down":
        say(f"{record.name} is over and down: exit status {record.exit_code}, results in {record.results}")
        return record.exit_code or 0
    try:
        if record.phase == "submitted":
            ended = _follow(record)
            record.note(phase="over", exit_code=exit_code_of(ended))
            say(f"The job is over: {ended['status'].lower()}, exit status {record.exit_code}")
            if ended["status"] != "SUCCEEDED" and ended.get("message"):
                say(ended["message"].strip().splitlines()[0])
        if record.phase == "over":
            bring_results(record)
        if record.phase == "fetched" and record.target == "running":
            record.note(phase="down")  # its cluster goes on
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
        where = patiently(
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


def logs(record: LaunchRecord) -> None:
    """Print the job's output so far, from here if it is here."""
    name = f"job-driver-{record.name}.log"
    here = Path(record.results) / name
    if here.is_file():
        sys.stdout.write(here.read_text(errors="replace"))
    else:
        sys.stdout.write(shell_of(record).run(f"cat /tmp/ray/session_latest/logs/{name}"))


def state_in_words(record: LaunchRecord) -> str:
    """Ask the head how the job stands; return it with what is up, and for how long."""
    (answer,) = shell_of(record).ask("status", record.name, timeout_s=60)
    words = str(answer["state"]["status"].lower())
    if words not in RUNNING:
        words += ", results fetched" if answer["fetched"] else ", results not fetched yet"
    if record.target == "running":
        return f"{words}; on {record.machines}"
    return f"{words}; up: {record.machines}, for {age(time.time() - record.created_s)}"


def fetch(record: LaunchRecord) -> None:
    """Bring what is there, also of a job that still runs."""
    head = shell_of(record)
    (answer,) = head.ask("status", record.name)
    running = answer["state"]["status"].lower() in RUNNING
    where = fetching.fetch(head, record.name, Path(record.results), record.log, final=not running)
    say(f"The results {'so far ' if running else ''}are in {', '.join(where)}")
    if running:
        return
    phase = "down" if record.target == "running" else "fetched"
    record.note(phase=phase, exit_code=exit_code_of(answer["state"]))
    if record.target != "running":
        say(f"Take the cluster down: horovod-tune down {record.name}")


def stop(record: LaunchRecord) -> None:
    """End the job."""
    shell_of(record).ask("stop", record.name)
    more = "" if record.target == "running" else " and the cluster"
    say(f"{record.name} is being stopped. Its results{more}: horovod-tune attach {record.name}")


def down(record: LaunchRecord, *, lose_results: bool) -> None:
    """Take the cluster down; results that are not here keep it up unless they may be lost.

    Raises:
        LaunchError: results are not here, or the cluster may still be up.
    """
    if record.phase == "submitted" and not lose_results:
        raise LaunchError(
            f"{record.name} has results that are not here. Stop it: horovod-tune stop {record.name}, "
            f"and bring them: horovod-tune attach {record.name}; "
            f"or lose them: horovod-tune down --lose-results {record.name}"
        )
    if record.phase == "over" and not lose_results:
        bring_results(record)
    match record.target:
        case "running":  # the cluster is not this launch's to end
            if record.phase == "submitted":
                shell_of(record).ask("stop", record.name)
            record.note(phase="down")
        case "elsewhere":
            line = "python -m horovod_tune.node.autostop --now --cloud $(cat ~/.horovod-tune/cloud)"
            shell_of(record).run(line, timeout_s=600)
            record.note(phase="down")
        case _:
            take_down(record)


def patiently(do: Callable[[], T]) -> T:
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
