"""What this machine remembers of each launch: a folder of the user's own in ``~/.horovod-tune/launches``."""

from __future__ import annotations

import getpass
import json
import os
import re
import secrets
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from horovod_tune.launch.values import LaunchError


def launches_folder() -> Path:
    """Return the folder of all records."""
    return Path(os.environ.get("HOROVOD_TUNE_HOME") or Path.home() / ".horovod-tune") / "launches"


@dataclass
class LaunchRecord:
    """One launch."""

    name: str
    target: str
    command: list[str]
    # Seconds since 1970.
    created_s: float
    # The folder of this machine that the results come to.
    results: str = ""
    # What the launching machine last did: new, up, submitted, over, fetched, down.
    phase: str = "new"
    user: str = ""
    # The cluster file, the batch script or the manifests.
    file: str = ""
    # How the head is reached: host, user, key.
    head: dict[str, str] = field(default_factory=dict)
    # Machines that were claimed.
    hosts: list[str] = field(default_factory=list)
    # What the cluster is made of, in words.
    machines: str = ""
    # How much of the job's output has been shown, in bytes.
    offset: int = 0
    exit_code: int | None = None
    keep_up: bool = False
    autostop_min: float = 0.0
    # The scheduler's number (Slurm), or the job's name.
    job: str = ""
    # The job's own log, where it is on this machine's file system (Slurm).
    log_file: str = ""

    @property
    def folder(self) -> Path:
        """Where the record and the log of the launch are."""
        return launches_folder() / self.name

    @property
    def log(self) -> Path:
        """The output of every command of the launch."""
        return self.folder / "launch.log"

    def save(self) -> None:
        """Write the record, whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        coming = self.folder / f".record.{os.getpid()}"
        coming.touch(mode=0o600)
        coming.write_text(json.dumps(asdict(self), indent=1))
        os.replace(coming, self.folder / "record.json")

    def note(self, **changes: Any) -> None:
        """Change fields and save."""
        for name, value in changes.items():
            setattr(self, name, value)
        self.save()


def load_record(name: str) -> LaunchRecord:
    """Return the record of that name.

    Raises:
        LaunchError: there is none; names those there are.
    """
    try:
        return LaunchRecord(**json.loads((launches_folder() / name / "record.json").read_text()))
    except FileNotFoundError:
        known = " ".join(record.name for record in all_records()) or "none"
        raise LaunchError(
            f"no launch is called {name!r} on this machine (there are: {known}). On another machine: "
            "--head USER@HOST --ssh-key FILE"
        ) from None


def all_records() -> list[LaunchRecord]:
    """Return all launches of this machine, the latest last."""
    found = [LaunchRecord(**json.loads(path.read_text())) for path in launches_folder().glob("*/record.json")]
    return sorted(found, key=lambda record: record.created_s)


def new_name(script: str, *, user: str | None = None, short_id: str | None = None) -> str:
    """Return a name that says whose launch of what it is, and is no other launch's.

    >>> new_name("train_MNIST.py", user="Ann.Lee", short_id="1f2e")
    'ann-lee-train-mnist-1f2e'
    """
    words = [user or getpass.getuser(), Path(script).stem]
    name = "-".join(re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-") for word in words).strip("-")
    return f"{name[:30].strip('-') or 'launch'}-{short_id or secrets.token_hex(2)}"


def age(seconds: float) -> str:
    """Return a duration as people say it.

    >>> [age(s) for s in (40, 600, 7800, 200000)]
    ['40 s', '10 min', '2 h 10 min', '2 d 7 h']
    """
    minutes = int(seconds // 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def refuse_name_in_use(name: str) -> None:
    """Raise if a launch of this machine has that name and is not down.

    Raises:
        LaunchError: it has; says what it is and how to come to it.
    """
    if not (launches_folder() / name / "record.json").is_file():
        return
    record = load_record(name)
    if record.phase != "down":
        since = age(time.time() - record.created_s)
        raise LaunchError(
            f"--name {name} is in use: {' '.join(record.command)}, launched {since} ago. "
            f"Follow it: horovod-tune attach {name}; end it: horovod-tune down {name}"
        )
