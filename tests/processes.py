"""What tests look at while trials run, and after: training processes, what Tune wrote, and a wait that ends.

Not in conftest.py: several folders have one, and `import conftest` is the one that was loaded last.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil


def training_processes() -> list[psutil.Process]:
    """Return the live training actors of this process's own Ray session."""
    import ray

    session = ray._private.worker._global_node.address_info["session_dir"]
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        command = " ".join(process.info["cmdline"] or [])
        if "TrainingActor" not in command:
            continue
        try:
            files = [each.path for each in process.open_files()]
        except psutil.Error:
            continue
        if any(path.startswith(session) for path in files):
            found.append(process)
    return found


def results_of(trial: Any) -> list[dict[str, Any]]:
    """Return what a trial has reported, as Tune wrote it."""
    path = Path(trial.path, "result.json")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def error_of(trial: Any) -> str:
    """Return the text of a trial's failures."""
    return Path(trial.path, "error.txt").read_text()


def run_python(*words: object, timeout_s: float = 120, **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run this Python with ``words``, which has to end well; return what it printed."""
    command = [sys.executable, *map(str, words)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, **settings)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-6000:]
    return ran


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
