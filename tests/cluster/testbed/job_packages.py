"""What Ray's job system needs and the environment of the tests lacks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path


def job_packages() -> str | None:
    """Return the folder with what `ray[default]` brings and this environment lacks; None if it lacks nothing.

    It is made once, by pip, in the user's cache. On a machine with few cores each `ray.init()` would pay for
    these packages if they were in the environment of the other tests.

    Raises:
        FileNotFoundError: pip could not make it.
    """
    import ray

    if importlib.util.find_spec("aiohttp_cors") is not None:
        return None
    folder = Path.home() / ".cache" / "horovod_tune" / f"ray-default-{ray.__version__}"
    if folder.is_dir():
        return str(folder)
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    wanted = f"ray[default]=={ray.__version__}"
    asked = subprocess.run(
        [*pip, "--dry-run", "--report", "-", wanted], capture_output=True, text=True, timeout=300
    )
    coming = folder.with_name(f"{folder.name}.{os.getpid()}")
    if asked.returncode == 0:
        lacking = [entry["metadata"] for entry in json.loads(asked.stdout)["install"]]
        names = [f"{package['name']}=={package['version']}" for package in lacking]
        asked = subprocess.run(
            [*pip, "--no-deps", "--target", str(coming), *names], capture_output=True, text=True, timeout=300
        )
    if asked.returncode:
        raise FileNotFoundError(f"pip install '{wanted}': {asked.stderr.strip()[-500:]}")
    coming.rename(folder)
    return str(folder)
