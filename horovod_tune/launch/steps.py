"""Runs on the machine that you type on: a thin layer over `ray up`, `ray submit`, `sbatch` and `kubectl`.

Every command is a list of words, so no shell of this machine sees a value.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from horovod_tune.launch.plans import ray_submit_command
from horovod_tune.launch.values import LaunchError

POLL_S = 2.0
# How long the machines may take to come and to be set up: compiling Horovod is part of it.
JOIN_TIMEOUT_S = 1800
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


def run(words: Sequence[str], *, check: bool = True) -> int:
    """Show a command, run it and return its exit status.

    Raises:
        LaunchError: its program is not installed.
        subprocess.CalledProcessError: it failed and `check` is set.
    """
    say("$ " + shlex.join(words))
    if shutil.which(words[0]) is None:
        raise LaunchError(f"{words[0]} is not on the PATH of this machine")
    return subprocess.run(list(words), check=check).returncode


def say(line: str) -> None:
    """Print a line of this command's own; what it runs prints to the same place."""
    print(line, file=sys.stderr, flush=True)


# --- ray up ------------------------------------------------------------------------------------------------


def ray_up_steps(
    file: str, command: Sequence[str], *, nodes: int, results: str, keep_up: bool
) -> list[list[str]]:
    """Return the commands of a launch with `ray up`, in order; the last takes the cluster down.

    `nodes` is how many machines the cluster has at its start, see `nodes_at_the_start`.
    """
    # A trial that spans machines is refused on a cluster that has not got them, so they are waited for.
    wait = (
        "python -m horovod_tune.node.wait_for_nodes "
        f"--address auto --nodes {nodes} --timeout-s {JOIN_TIMEOUT_S}"
    )
    steps = [
        ["ray", "up", "-y", file],
        ["ray", "exec", file, wait],
        ray_submit_command(file, command),
        ["ray", "rsync-down", file, "~/ray_results/", results],
    ]
    return steps if keep_up else [*steps, ["ray", "down", "-y", file]]


def nodes_at_the_start(config: Mapping[str, Any]) -> int:
    """Return how many machines a cluster file brings up at once, the head among them.

    >>> nodes_at_the_start({"provider": {"type": "local", "head_ip": "a", "worker_ips": ["b", "c"]}})
    3
    """
    if "worker_ips" in config["provider"]:
        return 1 + int(config.get("min_workers", len(config["provider"]["worker_ips"])))
    kinds = config.get("available_node_types", {}).values()
    return 1 + sum(kind.get("min_workers", 0) for kind in kinds)


def launch_with_ray_up(file: str, command: Sequence[str], *, nodes: int, results: str, keep_up: bool) -> int:
    """Bring a cluster up, run the script on it, bring the results back, take it down; return the exit status.

    The cluster goes down also when the script fails, or you interrupt; not when `keep_up` is set.
    """
    up, wait, submit, fetch, *down = ray_up_steps(
        file, command, nodes=nodes, results=results, keep_up=keep_up
    )
    if not Path(command[1]).is_file():
        raise LaunchError(f"after -- there must be a script of this folder, got {command[1]!r}: no such file")
    make_token()
    try:
        run(up)
        run(wait)
        status = run(submit, check=False)
        Path(results).mkdir(parents=True, exist_ok=True)
        if run(fetch, check=False):
            say(f"No results came from the head's ~/ray_results; the script ended with {status}.")
        else:
            say(f"The results are in {results}")
    finally:
        for words in down:
            if run(words, check=False):
                say(f"The cluster may still be up. Take it down: {shlex.join(words)}")
        if keep_up:
            say(f"The cluster stays up. Take it down: ray down -y {shlex.quote(file)}")
    return status


def make_token() -> None:
    """Make sure that this user has a token for Ray's clusters, and that only he reads it."""
    token = Path.home() / ".ray" / "auth_token"
    if not token.is_file():
        # Its standard output is the token itself.
        subprocess.run(["ray", "get-auth-token", "--generate"], check=True, stdout=subprocess.DEVNULL)
    token.chmod(0o600)


# --- Slurm -------------------------------------------------------------------------------------------------


def launch_with_slurm(words: Sequence[str], *, follow: bool) -> int:
    """Submit a job, show its log until it ends, and return what it exited with.

    An interrupt ends the showing, not the job.
    """
    say("$ " + shlex.join(words))
    if shutil.which(words[0]) is None:
        raise LaunchError("sbatch is not on the PATH of this machine: run this on the cluster's login node")
    submitted = subprocess.run(list(words), stdout=subprocess.PIPE, text=True)
    if submitted.returncode:
        return submitted.returncode
    job = submitted.stdout.strip().split(";")[0]
    say(f"Job {job}. End it: scancel {job}")
    if not follow:
        return 0
    try:
        return _follow(job)
    except KeyboardInterrupt:
        say(f"\nThe job goes on. End it: scancel {job}")
        return 130


def _follow(job: str) -> int:
    shown, log = 0, None
    while True:
        facts = _job_facts(job)
        log = log or (Path(facts["StdOut"]) if "StdOut" in facts else None)
        ended = facts.get("JobState") in ENDED
        if log is not None and log.is_file():
            with log.open("rb") as lines:
                lines.seek(shown)
                part = lines.read()
            shown += len(part)
            sys.stdout.buffer.write(part)
            sys.stdout.flush()
        if ended:
            status, _, signal = facts["ExitCode"].partition(":")
            say(f"Job {job}: {facts['JobState']}, exit code {facts['ExitCode']}")
            failed = facts["JobState"] != "COMPLETED"
            return int(status) or (128 + int(signal or 0) if signal != "0" else int(failed))
        time.sleep(POLL_S)


def _job_facts(job: str) -> dict[str, str]:
    shown = subprocess.run(["scontrol", "show", "job", "-o", job], capture_output=True, text=True)
    if shown.returncode:
        raise LaunchError(f"Slurm does not know job {job} any more: {shown.stderr.strip()}")
    return job_facts(shown.stdout)


def job_facts(line: str) -> dict[str, str]:
    """Return the fields of a line of `scontrol show job -o`.

    >>> job_facts("JobId=7 JobState=FAILED ExitCode=3:0 StdOut=/home/me/a b.log Power=")["StdOut"]
    '/home/me/a b.log'
    """
    return dict(re.findall(r"(\w+)=(.*?)(?=\s+\w+=|\s*$)", line.strip()))


# --- Kubernetes --------------------------------------------------------------------------------------------


def kuberay_steps(file: str, name: str) -> list[list[str]]:
    """Return the commands of a launch on Kubernetes, in order."""
    job = f"job/{name}"
    return [
        ["kubectl", "apply", "-f", file],
        ["kubectl", "wait", "--for=create", job, "--timeout=900s"],
        ["kubectl", "logs", "--follow", "--pod-running-timeout=900s", job],
        [
            "kubectl",
            "wait",
            f"rayjob/{name}",
            "--for=jsonpath={.status.jobStatus}=SUCCEEDED",
            "--timeout=60s",
        ],
    ]


def launch_with_kubectl(file: str, name: str) -> int:
    """Apply the manifests, show the job's output and return whether it succeeded as an exit status."""
    *steps, verdict = kuberay_steps(file, name)
    for words in steps:
        run(words)
    status = run(verdict, check=False)
    say(f"The results are on the claim {name}-results. Delete the job: kubectl delete rayjob {name}")
    return status


def write_file(path: str, text: str) -> None:
    """Write a cluster file for this user's eyes only, over a former one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
