"""`horovod-tune attach`, `logs`, `status`, `fetch`, `stop`, `down`, `list`: a launch, later."""

from __future__ import annotations

import argparse
import sys
import time
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
        match arguments.later:
            case "status":
                print(f"{record.name}  {' '.join(record.command)}  {state_in_words(record)}")
                print(f"results: {record.results or '(on the cluster)'}   log: {record.log}")
            case "attach":
                return int(kind_of(record).attach(record))
            case "down":
                kind_of(record).down(record, lose_results=arguments.lose_results)
            case _:
                getattr(kind_of(record), arguments.later)(record)
        return 0
    except (LaunchError, Unreachable) as error:
        print(f"horovod-tune {arguments.later}: {error}", file=sys.stderr)
        return 1


def find(arguments: argparse.Namespace) -> LaunchRecord:
    """Return the launch that is meant: by name, the latest, or one of another machine by its head.

    Raises:
        LaunchError: there is none.
        Unreachable: the head of `--head` cannot be reached.
    """
    from horovod_tune.launch import ray_up_end
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
        record.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (answer,) = ray_up_end.shell_of(record).ask("submission", record.name)
        if answer["job"].get("target") == "running":
            record.target, record.machines = "running", f"the cluster of {arguments.head}"
        record.command = list(answer["job"].get("command", []))
        record.save()
        return record
    if arguments.name is not None:
        return load_record(arguments.name)
    records = [record for record in all_records() if record.phase != "down"] or all_records()
    if not records:
        raise LaunchError("nothing has been launched from this machine")
    return records[-1]


def kind_of(record: LaunchRecord) -> Any:
    """Return the module with what this launch's kind of cluster does later."""
    from horovod_tune.launch import kuberay_launch, ray_up_end, slurm_launch

    kinds: dict[str, Any] = {"slurm": slurm_launch, "kuberay": kuberay_launch}
    return kinds.get(record.target, ray_up_end)


def state_in_words(record: LaunchRecord) -> str:
    """Return how a launch stands, asking where it runs."""
    from horovod_tune.launch.head_shell import Unreachable
    from horovod_tune.launch.values import LaunchError

    if record.phase == "down":
        return f"down, exit status {record.exit_code}"
    if record.phase in ("new", "up"):
        return f"being brought up, or interrupted at that: {record.machines}"
    try:
        return str(kind_of(record).state_in_words(record))
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
