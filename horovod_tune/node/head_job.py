"""Runs on the head of a cluster, called over ssh by `horovod-tune launch` and its follow-ups: one job, on
Ray's own job system.

`python -m horovod_tune.node.head_job ACTION JOB` prints JSON, a line a message; its actions are in `main`.
The job's folder (`job_files`) has been shipped before `submit`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from horovod_tune.node.job_files import EXPERIMENTS_VARIABLE, JobFiles, JobState

DASHBOARD = "http://127.0.0.1:8265"
POLL_S = 1.0
# A follower hears something at least so often, else its connection is dead.
ALIVE_S = 5.0
CHUNK = 65536
# How long Ray's dashboard may take to listen after `ray start` has returned.
DASHBOARD_TIMEOUT_S = 120.0


def client() -> Any:
    """Return Ray's client of this machine's jobs.

    Raises:
        OSError: Ray does not run here.
    """
    from ray.job_submission import JobSubmissionClient

    if (Path.home() / ".ray" / "auth_token").is_file():  # Ray itself refuses this mode without one
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    return JobSubmissionClient(DASHBOARD)


def client_in_time() -> tuple[Any, set[str]]:
    """Return Ray's client and the jobs that Ray knows, once its dashboard listens: soon after `ray start`.

    Raises:
        OSError: it does not listen in time.
    """
    deadline = time.monotonic() + DASHBOARD_TIMEOUT_S
    while True:
        try:
            jobs = client()
            return jobs, {details.submission_id for details in jobs.list_jobs()}
        except (OSError, RuntimeError) as error:
            if time.monotonic() > deadline or "ray[default]" in str(error):
                raise
            time.sleep(POLL_S)


def list_of_jobs() -> dict[str, Any]:
    """Return Ray's details of each job that it knows, by submission id.

    Raises:
        OSError: Ray does not run here.
    """
    return {details.submission_id: details for details in client().list_jobs() if details.submission_id}


def job_state(files: JobFiles, answers: Mapping[str, Any]) -> JobState:
    """Return the state of a job from Ray's answers; LOST where Ray was started again without it."""
    details = answers.get(files.job)
    if details is None:
        noted = files.noted()
        return (
            noted if noted is not None and noted.is_over else JobState("LOST", message="Ray knows it no more")
        )
    return JobState(
        str(getattr(details.status, "value", details.status)),
        details.driver_exit_code,
        details.end_time / 1000 if details.end_time else None,
        details.message or "",
    )


def state_of(files: JobFiles) -> JobState:
    """Return a job's state: Ray's word, or the last one that the watch heard when Ray has ended.

    Raises:
        OSError: Ray gives no answer and the job had not ended when it last did.
    """
    try:
        return job_state(files, list_of_jobs())
    except OSError:
        noted = files.noted()
        if noted is None or not noted.is_over:
            raise
        return noted


def submit(files: JobFiles) -> None:
    """Submit the job; one that was submitted before is left as it is.

    Raises:
        OSError: Ray's dashboard does not listen in time.
    """
    asked = files.submission()
    jobs, known = client_in_time()
    if files.job in known:
        return
    environment = {EXPERIMENTS_VARIABLE: str(files.experiments), "PYTHONUNBUFFERED": "1"}
    if asked.get("storage"):
        environment["RAY_STORAGE"] = asked["storage"]
    jobs.submit_job(
        entrypoint=entrypoint(
            asked["command"], nodes=asked.get("nodes", 1), timeout_s=asked["join_timeout_s"]
        ),
        submission_id=files.job,
        runtime_env={"working_dir": str(files.work), "env_vars": environment | asked.get("environment", {})},
        metadata={key: str(asked[key]) for key in ("user", "script") if key in asked},
    )


def entrypoint(command: list[str], *, nodes: int, timeout_s: float) -> str:
    """Return the shell line that Ray runs: wait for the machines, then the script.

    >>> entrypoint(["python", "tune.py", "a b"], nodes=1, timeout_s=60)
    "exec python -m horovod_tune.node.run_script tune.py 'a b'"
    """
    python, script, *arguments = command
    line = "exec " + shlex.join([python, "-m", "horovod_tune.node.run_script", script, *arguments])
    if nodes < 2:
        return line
    # A trial that spans machines is refused on a cluster that has not got them, so they are waited for.
    wait = [python, "-m", "horovod_tune.node.wait_for_nodes", "--address", "auto"]
    return shlex.join([*wait, "--nodes", str(nodes), "--timeout-s", f"{timeout_s:g}"]) + " && " + line


def log_file(job: str) -> Path:
    """Return where Ray writes a job's output on its head."""
    return Path("/tmp/ray/session_latest/logs") / f"job-driver-{job}.log"


def follow(files: JobFiles, offset: int) -> Iterator[dict[str, Any]]:
    """Give the job's output from byte `offset` on, signs of life in between, and its state when it ends."""
    said_s = time.monotonic()
    while True:
        state = state_of(files)  # before the output: what is over writes no more
        try:
            with log_file(files.job).open("rb") as log:
                log.seek(offset)
                while part := log.read(CHUNK):
                    offset += len(part)
                    yield {"log": part.decode(errors="replace"), "offset": offset}
                    said_s = time.monotonic()
        except FileNotFoundError:
            pass  # not started yet, or a Ray of before
        if state.is_over:
            files.note(state)
            yield {"ended": vars(state)}
            return
        if time.monotonic() - said_s > ALIVE_S:
            said_s = time.monotonic()
            yield {"status": state.status}
        time.sleep(POLL_S)


def experiments(files: JobFiles) -> list[dict[str, str]]:
    """Return where the script's experiments are, each once, and what it was told to fetch besides."""
    found = []
    if files.experiments.is_file():
        found = [json.loads(line) for line in files.experiments.read_text().splitlines()]
    for path in files.submission().get("fetch", []):
        found.append({"file_system": "local", "path": str(Path(path).expanduser())})
    return list({(entry["file_system"], entry["path"]): entry for entry in found}.values())


def results(files: JobFiles) -> Iterator[dict[str, Any]]:
    """Give each experiment with its files: path, size and checksum, for the fetcher to compare.

    The job's own output is among them.
    """
    entries = experiments(files)
    if log_file(files.job).is_file():
        entries.append({"file_system": "local", "path": str(log_file(files.job).resolve())})
    for entry in entries:
        if entry["file_system"] != "local":
            yield {**entry, "files": None, "complete": is_in_bucket(entry)}
            continue
        top = Path(entry["path"])
        listed = {
            str(path.relative_to(top)): [path.stat().st_size, checksum(path)]
            for path in sorted(top.rglob("*"))
            if path.is_file() and not path.is_symlink()
        }
        if top.is_file():
            listed = {"": [top.stat().st_size, checksum(top)]}
        yield {**entry, "files": listed, "complete": top.exists()}


def is_in_bucket(entry: Mapping[str, str]) -> bool:
    """Tell whether an experiment's state is in its bucket, as Tune leaves it there at the end."""
    from pyarrow import fs

    try:
        system, path = fs.FileSystem.from_uri(f"{entry['file_system']}://{entry['path']}")
        names = [info.base_name for info in system.get_file_info(fs.FileSelector(path))]
    except (OSError, ValueError):
        return False
    return any(name.startswith("experiment_state") for name in names)


def checksum(path: Path) -> str:
    """Return a file's BLAKE2b checksum, 16 bytes in hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()


def main(arguments: list[str] | None = None) -> int:
    """Do one thing with one job."""
    parser = argparse.ArgumentParser(prog="python -m horovod_tune.node.head_job", description=__doc__)
    parser.add_argument(
        "action", choices=["known", "submit", "submission", "status", "follow", "stop", "results", "fetched"]
    )
    parser.add_argument("job")
    parser.add_argument("--offset", type=int, default=0)
    options = parser.parse_args(arguments)
    files = JobFiles(options.job)

    def say(message: Mapping[str, Any]) -> None:
        print(json.dumps(message), flush=True)

    try:
        match options.action:
            case "known":
                say({"known": files.job in client_in_time()[1]})
            case "submit":
                submit(files)
                say({"submitted": files.job})
            case "submission":
                say({"job": files.submission()})
            case "status":
                state = state_of(files)
                say({"state": vars(state), "fetched": files.fetched.exists(), "job": files.submission()})
            case "follow":
                for message in follow(files, options.offset):
                    say(message)
            case "stop":
                client().stop_job(files.job)
                say({"stopped": files.job})
            case "results":
                for message in results(files):
                    say(message)
            case "fetched":
                files.fetched.touch()
                say({"fetched": files.job})
    except BrokenPipeError:
        # The follower has gone; what is left must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, RuntimeError) as error:
        print(f"head_job: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
