"""Runs on the head of a launched cluster, beside Ray: ends the cluster when nobody needs it any more.

`python -m horovod_tune.node.autostop --detach --grace-min 720 --cloud aws`

The machine that launched the search ends the cluster once it has the results. This watch is for the case that
it never comes back: after the last job, and a grace time without a fetch, the cluster ends itself. It also
ends a cluster that never got a job.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from horovod_tune.node.head_job import job_state, list_of_jobs
from horovod_tune.node.job_files import HOME, JobState, all_jobs

POLL_S = 15.0
# For a cluster that was brought up and given nothing to do.
NO_JOB_GRACE_S = 3600.0
# When the results are safe, the launching machine has this long to take the cluster down itself.
FETCHED_GRACE_S = 600.0
# Ray that is away for so long has been stopped by somebody: machines that are yours are then let be.
RAY_GONE_S = 300.0
METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/"


@dataclass(frozen=True)
class Situation:
    """What the watch sees; times in seconds on one clock."""

    now_s: float
    up_since_s: float
    states: tuple[JobState, ...]
    all_fetched: bool
    # For how long Ray has given no answer.
    ray_gone_s: float = 0.0


def reason_to_end(seen: Situation, *, grace_s: float, fetched_grace_s: float = FETCHED_GRACE_S) -> str | None:
    """Return why the cluster must end now, or None while it is wanted. A `grace_s` of 0 is no end.

    >>> over = JobState("SUCCEEDED", exit_code=0, ended_at_s=1000.0)
    >>> reason_to_end(Situation(4700.0, 0.0, (over,), all_fetched=False), grace_s=3600.0)
    'the last job ended 62 min ago and its results were not fetched'
    """
    if any(not state.is_over for state in seen.states) and not seen.ray_gone_s:
        return None
    if not seen.states:
        idle_s = seen.now_s - seen.up_since_s
        return f"no job came in {idle_s / 60:.0f} min" if grace_s and idle_s > NO_JOB_GRACE_S else None
    ended_s = max(state.ended_at_s or seen.up_since_s for state in seen.states)
    idle_s = min(seen.now_s - ended_s, seen.now_s - seen.up_since_s)
    if any(not state.is_over for state in seen.states):
        idle_s = seen.ray_gone_s
    if not grace_s:
        return None
    if seen.all_fetched and idle_s > min(fetched_grace_s, grace_s):
        return f"the last job ended {idle_s / 60:.0f} min ago and its results were fetched"
    if idle_s > grace_s:
        return f"the last job ended {idle_s / 60:.0f} min ago and its results were not fetched"
    return None


def end_commands(cloud: str) -> list[list[str]]:
    """Return what ends the cluster from its head, in order.

    The workers first: a head that is gone cannot end them any more.
    """
    if cloud == "local":
        return [["ray", "stop"], ["rm", "-f", str(HOME.expanduser() / "claim.json")]]
    workers = ["ray", "down", "-y", "--workers-only", os.path.expanduser("~/ray_bootstrap_config.yaml")]
    if cloud == "aws":  # the instance terminates on shutdown: its cluster file says so
        return [workers, ["sudo", "shutdown", "-h", "now"]]
    return [workers, [sys.executable, "-m", "horovod_tune.node.autostop", "--delete-this-instance"]]


def delete_this_instance() -> None:
    """Ask Google Cloud to delete the machine that this runs on: one that is only shut down keeps its disk.

    Raises:
        OSError: the metadata service or the API cannot be reached, or refuses.
    """

    def metadata(name: str) -> str:
        request = urllib.request.Request(METADATA + name, headers={"Metadata-Flavor": "Google"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return str(answer.read().decode())

    zone, name = metadata("zone"), metadata("name")  # the zone as projects/NUMBER/zones/ZONE
    token = json.loads(metadata("service-accounts/default/token"))["access_token"]
    request = urllib.request.Request(
        f"https://compute.googleapis.com/compute/v1/{zone}/instances/{name}",
        method="DELETE",
        headers={"Authorization": f"Bearer {token}"},
    )
    urllib.request.urlopen(request, timeout=30).close()


def look(up_since_s: float, ray_gone_s: float) -> Situation:
    """Ask Ray about the jobs, and keep what it says for the time after it."""
    jobs = all_jobs()
    answers = list_of_jobs() if jobs else {}
    states = [job_state(files, answers) for files in jobs]
    for files, state in zip(jobs, states, strict=True):
        files.note(state)
    fetched = bool(jobs) and all(files.fetched.exists() for files in jobs)
    return Situation(time.time(), up_since_s, tuple(states), fetched, ray_gone_s)


def watch(cloud: str, grace_s: float, fetched_grace_s: float) -> None:
    """Look until there is a reason to end the cluster, and end it."""
    up_since_s = answered_s = time.time()
    while True:
        gone_s = time.time() - answered_s
        try:
            seen = look(up_since_s, 0.0)
            answered_s = time.time()
        except OSError as error:
            print(f"autostop: Ray gives no answer: {error}", flush=True)
            if cloud == "local" and gone_s > RAY_GONE_S:
                return
            states = tuple(state for files in all_jobs() if (state := files.noted()))
            seen = Situation(time.time(), up_since_s, states, False, ray_gone_s=max(gone_s, 1.0))
        reason = reason_to_end(seen, grace_s=grace_s, fetched_grace_s=fetched_grace_s)
        if reason is not None:
            print(f"autostop: {time.strftime('%F %T')} ending the cluster: {reason}", flush=True)
            end(cloud)
            return
        time.sleep(POLL_S)


def end(cloud: str) -> None:
    """End the cluster that this machine is the head of."""
    for words in end_commands(cloud):
        ended = subprocess.run(words, capture_output=True, text=True)
        print(f"$ {' '.join(words)}: {ended.returncode} {(ended.stdout + ended.stderr)[-2000:]}", flush=True)


def replace_watch(cloud: str, arguments: Sequence[str]) -> None:
    """Start the watch in a session of its own, in place of one that runs."""
    folder = HOME.expanduser()
    folder.mkdir(mode=0o700, exist_ok=True)
    end_watch()
    # The set-up has come to its end: a machine that got stuck in it would have shut itself down.
    if cloud != "local" and shutil.which("sudo"):
        subprocess.run(["sudo", "-n", "shutdown", "-c"], capture_output=True)
    with open(folder / "autostop.log", "ab") as log:
        started = subprocess.Popen(
            [sys.executable, "-m", "horovod_tune.node.autostop", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    (folder / "autostop.pid").write_text(str(started.pid))
    (folder / "cloud").write_text(cloud + "\n")  # for whoever ends the cluster from here by hand


def end_watch() -> None:
    """End the watch of this machine, if there is one."""
    file = HOME.expanduser() / "autostop.pid"
    try:
        process = int(file.read_text())
        if b"horovod_tune.node.autostop" in Path(f"/proc/{process}/cmdline").read_bytes():
            os.kill(process, signal.SIGTERM)
    except (FileNotFoundError, ProcessLookupError, ValueError):
        pass
    file.unlink(missing_ok=True)


def main(arguments: list[str] | None = None) -> int:
    """Watch, or start or end the watch."""
    parser = argparse.ArgumentParser(prog="python -m horovod_tune.node.autostop", description=__doc__)
    parser.add_argument("--cloud", choices=["local", "aws", "gcp"], default="local")
    parser.add_argument("--grace-min", type=float, default=720.0, help="minutes; 0: never")
    parser.add_argument("--keep-up", action="store_true", help="the same grace after a fetch")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--detach", action="store_true", help="in the background, in place of a former watch")
    mode.add_argument("--cancel", action="store_true", help="end the watch")
    mode.add_argument("--now", action="store_true", help="end the cluster")
    mode.add_argument("--delete-this-instance", action="store_true", help="of Google Cloud")
    options = parser.parse_args(arguments)
    if options.detach:
        kept = ["--keep-up"] if options.keep_up else []
        replace_watch(options.cloud, ["--cloud", options.cloud, "--grace-min", str(options.grace_min), *kept])
    elif options.cancel:
        end_watch()
    elif options.now:
        end(options.cloud)
    elif options.delete_this_instance:
        delete_this_instance()
    else:
        grace_s = options.grace_min * 60
        watch(options.cloud, grace_s, grace_s if options.keep_up else FETCHED_GRACE_S)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
