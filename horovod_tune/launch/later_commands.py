"""`horovod-tune attach`, `logs`, `status`, `fetch`, `stop`, `down`, `list`: a launch, later."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from horovod_tune.launch.launch_record import LaunchRecord

COMMANDS = {
    "attach": "follow a launched job again, bring its results, take its cluster down",
    "logs": "show a launched job's output so far",
    "status": "say how a launched job stands",
    "fetch": "bring a launched job's results here",
    "stop": "end a launched job; its cluster stays until its results are here",
    "down": "take a launch's cluster down",
}


def add_parsers(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to `horovod-tune`."""
    for name, text in COMMANDS.items():
        parser = subparsers.add_parser(name, help=text, description=text.capitalize() + ".")
        parser.add_argument("name", nargs="?", help="of the launch (the latest one)")
        parser.add_argument("--head", metavar="USER@HOST", help="from a machine that did not launch it")
        parser.add_argument("--ssh-key", help="for --head")
        parser.set_defaults(run=run, later=name)
        if name in ("fetch", "attach"):
            parser.add_argument("--results", help="the folder that they come to")
        if name == "down":
            parser.add_argument("--lose-results", action="store_true", help="also when they are not here")
    parser = subparsers.add_parser("list", help="list the launches of this machine and what is up")
    parser.add_argument("--all", action="store_true", help="those that are down too")
    parser.set_defaults(run=run, later="list", name=None)


def run(arguments: argparse.Namespace) -> int:
    """Run one of them; return its exit status."""
    from horovod_tune.launch.head_shell import Unreachable
    from horovod_tune.launch.values import LaunchError

    try:
        if arguments.later == "list":
            return list_launches(everything=arguments.all)
        record = find(arguments)
        if getattr(arguments, "results", None):
            record.note(results=str(Path(arguments.results).resolve()))
        action: dict[str, Callable[..., int]] = {
            "attach": attach, "logs": logs, "status": status, "fetch": fetch, "stop": stop,
        }  # fmt: skip
        if arguments.later == "down":
            return down(record, lose_results=arguments.lose_results)
        return action[arguments.later](record)
    except (LaunchError, Unreachable) as error:
        print(f"horovod-tune {arguments.later}: {error}", file=sys.stderr)
        return 1


def find(arguments: argparse.Namespace) -> LaunchRecord:
    """Return the launch that is meant: by name, the latest, or one of another machine by its head.

    Raises:
        LaunchError: there is none.
    """
    from horovod_tune.launch.launch_record import LaunchRecord, all_records, load_record
    from horovod_tune.launch.values import LaunchError, head_of_option

    if arguments.head is not None:
        if not arguments.name:
            raise LaunchError("with --head the launch's name must be given")
        record = LaunchRecord(
            arguments.name,
            "elsewhere",
            [],
            time.time(),
            phase="submitted",
            results=str(Path("ray_results").resolve()),
            head=head_of_option(arguments.head, arguments.ssh_key),
            keep_up=True,
            machines="its machines",
        )
        record.save()
        return record
    if arguments.name is not None:
        return load_record(arguments.name)
    records = [record for record in all_records() if record.phase != "down"] or all_records()
    if not records:
        raise LaunchError("nothing has been launched from this machine")
    return records[-1]


def attach(record: LaunchRecord) -> int:
    """Follow it as the launch did."""
    from horovod_tune.launch import kuberay_launch, ray_up_end, slurm_launch
    from horovod_tune.launch.console import say
    from horovod_tune.launch.values import LaunchError

    if record.target == "slurm":
        return slurm_launch.attach(record)
    if record.target == "kuberay":
        return kuberay_launch.attach(record)
    if record.phase in ("new", "up"):
        raise LaunchError(
            f"{record.name} was interrupted before its job was submitted (log: {record.log}). "
            f"End what is up: horovod-tune down {record.name}"
        )
    if record.phase == "down":
        say(f"{record.name} is over and down: exit status {record.exit_code}, results in {record.results}")
        return record.exit_code or 0
    return ray_up_end.attach(record)


def logs(record: LaunchRecord) -> int:
    """Print the output so far."""
    import subprocess

    from horovod_tune.launch.ray_up_end import shell_of

    if record.target == "slurm":
        sys.stdout.write(Path(record.log_file).read_text(errors="replace"))
    elif record.target == "kuberay":
        return subprocess.run(["kubectl", "logs", f"job/{record.name}"]).returncode
    else:
        here = Path(record.results) / f"job-driver-{record.name}.log"
        if here.is_file():
            sys.stdout.write(here.read_text(errors="replace"))
        else:
            path = f"/tmp/ray/session_latest/logs/job-driver-{record.name}.log"
            sys.stdout.write(shell_of(record).run(f"cat {path}"))
    return 0


def status(record: LaunchRecord) -> int:
    """Print one line, and where the log is."""
    print(f"{record.name}  {' '.join(record.command)}  {state_in_words(record)}")
    print(f"results: {record.results or '(on the cluster)'}   log: {record.log}")
    return 0


def state_in_words(record: LaunchRecord) -> str:
    """Return how a launch stands, asking where it runs."""
    from horovod_tune.launch import kuberay_launch, slurm_launch
    from horovod_tune.launch.head_shell import Unreachable
    from horovod_tune.launch.launch_record import age
    from horovod_tune.launch.ray_up_end import shell_of
    from horovod_tune.launch.values import LaunchError

    if record.phase == "down":
        return f"down, exit status {record.exit_code}"
    if record.phase in ("new", "up"):
        return f"being brought up, or interrupted at that: {record.machines}"
    try:
        if record.target == "slurm":
            return slurm_launch.tasks_in_words(record.job)
        if record.target == "kuberay":
            return (kuberay_launch.job_status(record.name) or "no answer").lower()
        (answer,) = shell_of(record).ask("status", record.name, timeout_s=60)
        over: dict[str, Any] = answer["state"]
        fetched = ", results fetched" if answer["fetched"] else ", results not fetched yet"
        words = over["status"].lower() + (fetched if over["status"] not in ("RUNNING", "PENDING") else "")
        return f"{words}; up: {record.machines}, for {age(time.time() - record.created_s)}"
    except (Unreachable, LaunchError) as error:
        return f"no answer from its machines: {str(error).splitlines()[0]}"


def list_launches(*, everything: bool) -> int:
    """Print each launch with its age and its state, those that are up asked at once."""
    from concurrent.futures import ThreadPoolExecutor

    from horovod_tune.launch.launch_record import age, all_records

    records = [record for record in all_records() if everything or record.phase != "down"]
    if not records:
        print("nothing is up" if not everything else "nothing has been launched from this machine")
        return 0
    with ThreadPoolExecutor(max_workers=16) as pool:
        states = list(pool.map(state_in_words, records))
    for record, state in zip(records, states, strict=True):
        print(f"{record.name}  {record.target}  {age(time.time() - record.created_s)} old  {state}")
    return 0


def fetch(record: LaunchRecord) -> int:
    """Bring what is there, also of a job that still runs."""
    from horovod_tune.launch import fetching, kuberay_launch
    from horovod_tune.launch.console import say
    from horovod_tune.launch.ray_up_end import shell_of

    if record.target == "slurm":
        say(f"The results are where the script put them, on this file system; the log is {record.log_file}")
    elif record.target == "kuberay":
        kuberay_launch.fetch(record)
    else:
        head = shell_of(record)
        (answer,) = head.ask("status", record.name)
        running = answer["state"]["status"] in ("RUNNING", "PENDING")
        where = fetching.fetch(head, record.name, Path(record.results), record.log, final=not running)
        say(f"The results {'so far ' if running else ''}are in {', '.join(where)}")
        if not running:
            record.note(phase="fetched")
            say(f"Take the cluster down: horovod-tune down {record.name}")
    return 0


def stop(record: LaunchRecord) -> int:
    """End the job."""
    from horovod_tune.launch import kuberay_launch, slurm_launch
    from horovod_tune.launch.console import say
    from horovod_tune.launch.ray_up_end import shell_of

    if record.target == "slurm":
        slurm_launch.stop(record)
    elif record.target == "kuberay":
        kuberay_launch.stop(record)
    else:
        shell_of(record).ask("stop", record.name)
        say(f"{record.name} is being stopped. Its results and the cluster: horovod-tune attach {record.name}")
    return 0


def down(record: LaunchRecord, *, lose_results: bool) -> int:
    """Take the cluster down; results that are not here keep it up unless they may be lost."""
    from horovod_tune.launch import kuberay_launch, ray_up_end, slurm_launch
    from horovod_tune.launch.values import LaunchError

    if record.target == "slurm":
        if slurm_launch.tasks_in_words(record.job) != "ended":
            slurm_launch.stop(record)
        record.note(phase="down")
        return 0
    if record.target == "kuberay":
        kuberay_launch.down(record, lose_results=lose_results)
        return 0
    if record.phase == "submitted" and not lose_results:
        raise LaunchError(
            f"{record.name} has results that are not here. Stop it: horovod-tune stop {record.name}, "
            f"and bring them: horovod-tune attach {record.name}; "
            f"or lose them: horovod-tune down --lose-results {record.name}"
        )
    if record.phase == "over" and not lose_results:
        ray_up_end.bring_results(record)
    if record.target == "running":  # the cluster is not this launch's to end
        if record.phase == "submitted":
            ray_up_end.shell_of(record).ask("stop", record.name)
        record.note(phase="down")
        return 0
    if record.target == "elsewhere":
        line = "python -m horovod_tune.node.autostop --now --cloud $(cat ~/.horovod-tune/cloud)"
        ray_up_end.shell_of(record).run(line, timeout_s=600)
        record.note(phase="down")
        return 0
    ray_up_end.take_down(record)
    return 0
