"""`horovod-tune launch slurm`: from its options to a batch job."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from horovod_tune.launch import (
    cluster_files,
    slurm_launch,
)
from horovod_tune.launch.new_launch import record_of, script_of
from horovod_tune.launch.script import Script
from horovod_tune.launch.values import (
    LaunchError,
    checked,
    checked_count,
)


def run_slurm(arguments: argparse.Namespace) -> int:
    """Submit the script as a Slurm job, and follow it unless asked not to; return the exit status."""
    if not arguments.command:
        raise LaunchError("after -- there must be the command to run, e.g. -- python tune.py; got nothing")
    words = _sbatch_words(arguments)
    script = Script(arguments.command[0], Path((*arguments.command, "")[1]), ())
    if Path(arguments.command[0]).name in ("python", "python3"):
        script = script_of(arguments)
    if arguments.dry_run:
        print(Path(arguments.file or cluster_files.cluster_file("slurm.sbatch")).read_text())
        print("$ " + shlex.join(words))
        return 0
    record = record_of(arguments, script, machines=f"{arguments.nodes} nodes of Slurm")
    record.save()
    try:
        slurm_launch.submit(record, words, log_pattern=_slurm_log(arguments))
    except LaunchError:
        record.note(phase="down")
        raise
    if arguments.array:
        print(f"One log a task: {_slurm_log(arguments)}. Their states: horovod-tune status {record.name}")
    if arguments.no_follow or arguments.array:
        return 0
    return slurm_launch.attach(record)


def _slurm_log(arguments: argparse.Namespace) -> str:
    return "horovod-tune-%A_%a.log" if arguments.array else "horovod-tune-%j.log"


def _sbatch_words(arguments: argparse.Namespace) -> list[str]:
    if arguments.time is not None:
        checked("--time", "Slurm time", arguments.time)
    for option in ("partition", "account", "qos", "mem"):
        if getattr(arguments, option) is not None:
            checked(f"--{option}", "Slurm word", getattr(arguments, option))
    if arguments.constraint is not None:
        checked("--constraint", "Slurm constraint", arguments.constraint)
    if arguments.array is not None:
        checked("--array", "Slurm array", arguments.array)
    if arguments.cpus_per_task is not None:
        checked_count("--cpus-per-task", arguments.cpus_per_task, least=1, most=1024)
    if arguments.requeues is not None:
        checked_count("--requeues", arguments.requeues, least=0, most=10000)
    for option in arguments.sbatch:
        checked("--sbatch", "sbatch option", option)
    requeues = None if arguments.requeues is None else f"ALL,HOROVOD_TUNE_REQUEUES={arguments.requeues}"
    options = {
        "--nodes": arguments.nodes,
        "--gpus-per-node": arguments.gpus_per_node or None,
        "--cpus-per-task": arguments.cpus_per_task,
        "--job-name": arguments.name,
        "--time": arguments.time,
        "--mem": arguments.mem,
        "--partition": arguments.partition,
        "--account": arguments.account,
        "--constraint": arguments.constraint,
        "--qos": arguments.qos,
        "--exclusive": arguments.exclusive,
        "--array": arguments.array,
        "--output": _slurm_log(arguments) if arguments.array else None,
        "--export": requeues,
    }
    script = arguments.file or str(cluster_files.cluster_file("slurm.sbatch"))
    return slurm_launch.sbatch_command(script, arguments.command, options, arguments.sbatch)
