"""What tests look at while trials run: the session's own training processes, and a wait that ends.

Not in conftest.py: several folders have one, and `import conftest` is the one that was loaded last.
"""

from __future__ import annotations

import time
from collections.abc import Callable
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
