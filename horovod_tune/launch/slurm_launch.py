"""A launch on Slurm, from the login node: the batch job needs nobody here, its log is a common file."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from horovod_tune.launch.console import say
from horovod_tune.launch.launch_record import LaunchRecord
from horovod_tune.launch.values import LaunchError

POLL_S = 2.0
DETACHED = 130
# How long Slurm's controller may give no answer: it may be restarted while a job runs.
SILENT_S = 300.0
ENDED = {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "BOOT_FAIL",
    "DEADLINE",
}


class JobForgotten(LaunchError):
    """Slurm's controller does not know the job any more: it ended some time ago."""


def sbatch_command(
    script: str, command: Sequence[str], options: Mapping[str, object], more: Sequence[str]
) -> list[str]:
    """Return `sbatch` of `script` with `command` as its arguments, which no shell sees.

    >>> options = {"--nodes": 4, "--mem": None}
    >>> sbatch_command("slurm.sbatch", ["python", "tune.py"], options, ["--mail-type=END"])
    ['sbatch', '--parsable', '--nodes=4', '--mail-type=END', 'slurm.sbatch', 'python', 'tune.py']
    """
    words = [
        option if value is True else f"{option}={value}"
        for option, value in options.items()
        if value is not None and value is not False
    ]
    return ["sbatch", "--parsable", *words, *more, script, *command]


def submit(record: LaunchRecord, words: Sequence[str], *, log_pattern: str) -> None:
    """Submit the batch job.

    Raises:
        LaunchError: there is no sbatch here, or it refuses.
    """
    if shutil.which(words[0]) is None:
        raise LaunchError("sbatch is not on the PATH of this machine: run this on the cluster's login node")
    submitted = subprocess.run(list(words), capture_output=True, text=True)
    if submitted.returncode:
        raise LaunchError(submitted.stderr.strip() or f"sbatch ended with {submitted.returncode}")
    if submitted.stderr.strip():
        say(submitted.stderr.strip())
    job = submitted.stdout.strip().split(";")[0]
    log = str(Path.cwd() / log_pattern.replace("%j", job))
    record.note(job=job, phase="submitted", log_file=log)
    say(f"Slurm job {job} as {record.name}, log {log}")


def attach(record: LaunchRecord) -> int:
    """Show the job's log until it ends; return its exit status. An interrupt ends only the showing."""
    say(f"Ctrl-C detaches; then: horovod-tune attach|logs|status|stop {record.name}")
    try:
        status, words = _follow(record)
    except KeyboardInterrupt:
        say(f"\nDetached: job {record.job} goes on.")
        say(f"Come back: horovod-tune attach {record.name}    Stop it: horovod-tune stop {record.name}")
        return DETACHED
    record.note(phase="down", exit_code=status)
    say(f"Job {record.job}: {words}")
    return status


def _follow(record: LaunchRecord) -> tuple[int, str]:
    silent_since = None
    while True:
        try:
            facts = job_facts_of(record.job)
            silent_since = None
        except JobForgotten:
            show_log(record)
            raise
        except LaunchError as error:
            facts = {}
            silent_since = silent_since or time.monotonic()
            if time.monotonic() - silent_since > SILENT_S:
                raise LaunchError(
                    f"{error}\nJob {record.job} may still run: horovod-tune attach {record.name}"
                ) from None
        show_log(record)
        if facts.get("JobState") in ENDED:
            return exit_status(facts), f"{facts['JobState']}, exit code {facts['ExitCode']}"
        time.sleep(POLL_S)


def show_log(record: LaunchRecord) -> None:
    """Print what is new in the job's log."""
    log = Path(record.log_file)
    if not log.is_file():
        return
    with log.open("rb") as lines:
        lines.seek(record.offset)
        part = lines.read()
    if part:
        sys.stdout.buffer.write(part)
        sys.stdout.flush()
        record.note(offset=record.offset + len(part))


def exit_status(facts: Mapping[str, str]) -> int:
    """Return the exit status of a job that has ended, as a shell would give it.

    >>> exit_status({"JobState": "FAILED", "ExitCode": "3:0"})
    3
    >>> exit_status({"JobState": "CANCELLED", "ExitCode": "0:15"})
    143
    """
    status, _, signal = facts["ExitCode"].partition(":")
    return int(status) or (
        128 + int(signal) if signal not in ("", "0") else int(facts["JobState"] != "COMPLETED")
    )


def job_facts_of(job: str) -> dict[str, str]:
    """Ask Slurm about a job.

    Raises:
        JobForgotten: Slurm does not know it any more.
        LaunchError: Slurm gives no answer now.
    """
    shown = subprocess.run(["scontrol", "show", "job", "-o", job], capture_output=True, text=True)
    if shown.returncode == 0 and shown.stdout.strip():
        return job_facts(shown.stdout.splitlines()[0])
    if "Invalid job id" in shown.stderr or shown.returncode == 0:
        raise JobForgotten(f"Slurm does not know job {job} any more: it ended some time ago")
    raise LaunchError(f"Slurm gives no answer: {shown.stderr.strip()}")


def job_facts(line: str) -> dict[str, str]:
    """Return the fields of a line of `scontrol show job -o`.

    >>> job_facts("JobId=7 JobState=FAILED ExitCode=3:0 StdOut=/home/me/a b.log Power=")["StdOut"]
    '/home/me/a b.log'
    """
    return dict(re.findall(r"(\w+)=(.*?)(?=\s+\w+=|\s*$)", line.strip()))


def logs(record: LaunchRecord) -> None:
    """Print the job's output so far."""
    sys.stdout.write(Path(record.log_file).read_text(errors="replace"))


def fetch(record: LaunchRecord) -> None:
    """Say where the results are: nothing has to come."""
    say(f"The results are where the script put them, on this file system; the log is {record.log_file}")


def state_in_words(record: LaunchRecord) -> str:
    """Return how many tasks of a job, or of a job array, are in which state."""
    shown = subprocess.run(["scontrol", "show", "job", "-o", record.job], capture_output=True, text=True)
    states: dict[str, int] = {}
    for line in shown.stdout.splitlines():
        state = job_facts(line).get("JobState", "?")
        states[state] = states.get(state, 0) + 1
    return ", ".join(f"{count} {state.lower()}" for state, count in sorted(states.items())) or "ended"


def stop(record: LaunchRecord) -> None:
    """End the job.

    Raises:
        LaunchError: Slurm refuses.
    """
    ended = subprocess.run(["scancel", record.job], capture_output=True, text=True)
    if ended.returncode:
        raise LaunchError(ended.stderr.strip())
    say(f"Job {record.job} is being ended.")


def down(record: LaunchRecord, *, lose_results: bool) -> None:
    """End the job if it has not ended; results are where the script put them, in any case."""
    if state_in_words(record) != "ended":
        stop(record)
    record.note(phase="down")
