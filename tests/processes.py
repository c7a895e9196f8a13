"""What tests look at while trials run, and after: training processes, what Tune wrote, and a wait that ends.

Not in conftest.py: several folders have one, and `import conftest` is the one that was loaded last.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from sessions import session_dir


def processes_of(folder: str, *, named: str = "") -> list[psutil.Process]:
    """Return the processes with ``named`` in their command that name ``folder`` or have a file in it open."""

    def is_one(process: psutil.Process) -> bool:
        command = command_of(process)
        if process.pid == os.getpid() or named not in command:
            return False
        with contextlib.suppress(psutil.Error):
            return folder in command or any(each.path.startswith(folder) for each in process.open_files())
        return False

    return [process for process in psutil.process_iter() if is_one(process)]


def training_processes() -> list[psutil.Process]:
    """Return the live training actors of this process's own Ray session."""
    return processes_of(session_dir(), named="TrainingActor")


def template_processes() -> list[psutil.Process]:
    """Return the live templates of this process's own Ray session: their output is an actor's."""
    found = processes_of(session_dir(), named="horovod_tune_template")
    return [each for each in found if each.ppid() not in {other.pid for other in found}]


def rank_processes() -> list[psutil.Process]:
    """Return the live ranks of this process's own Ray session."""
    return [rank for each in template_processes() for rank in each.children()]


def command_of(process: psutil.Process) -> str:
    """Return a process's command line; "" if it has ended."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def see_them_gone(processes: Sequence[psutil.Process]) -> None:
    def left() -> list[psutil.Process]:
        return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]

    eventually(lambda: not left(), why=left)


def results_of(trial: Any) -> list[dict[str, Any]]:
    """Return what a trial has reported, as Tune wrote it."""
    path = Path(trial.path, "result.json")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def last_results(analysis: Any) -> list[dict[str, Any]]:
    return [trial.last_result for trial in analysis.trials]


def records_of(analysis: Any) -> list[dict[str, Any]]:
    """Return the reports of an analysis's only trial, which must have ended well and without a failure."""
    (trial,) = analysis.trials
    error = Path(trial.error_file).read_text() if trial.error_file else ""
    assert trial.status == "TERMINATED" and trial.num_failures == 0, error
    records: list[dict[str, Any]] = next(iter(analysis.trial_dataframes.values())).to_dict("records")
    return records


def error_of(trial: Any) -> str:
    """Return the text of a trial's failures."""
    return Path(trial.path, "error.txt").read_text()


def run_python(*words: object, timeout_s: float = 120, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run this Python with ``words``, which has to end well; return what it printed."""
    command = [sys.executable, *map(str, words)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, **settings)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-6000:]
    return ran


def stand_in(folder: Path, name: str, script: str) -> Path:
    """Write a program that plays another one."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)
    return path


def eventually(holds: Callable[[], Any], *, within_s: float = 20.0, why: Any = "") -> Any:
    """Return what ``holds()`` returns as soon as it is true; fail after ``within_s``."""
    end = time.monotonic() + within_s
    while True:
        value = holds()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"not within {within_s:g} s: {why() if callable(why) else why or holds}")
        time.sleep(0.1)


def mangled(data: bytes, source: random.Random, pieces: Sequence[bytes]) -> bytes:
    """Return ``data`` with some bytes changed, inserted (also of ``pieces``), cut out or cut off."""
    made = bytearray(data)
    for _ in range(source.randint(1, 5)):
        at = source.randrange(len(made) + 1)
        match source.randrange(5):
            case 0 if made:
                made[at % len(made)] = source.randrange(256)
            case 1:
                made[at:at] = source.randbytes(source.randrange(1, 20))
            case 2:
                del made[at : at + source.randrange(1, 15)]
            case 3:
                made[at:at] = source.choice(pieces)
            case _:
                del made[at:]
    return bytes(made)
