"""Starts ranks by forking a process that has torch loaded, instead of starting a new Python.

Ray starts the worker process of such a rank with `client.py` in place of ``python`` (its ``py_executable``).
The client hands Ray's command line, environment and standard streams to the fork server of the job on this
host, and ends; the server forks, and the child runs the command in the Python that it is a copy of. Where
anything of that is impossible, the client becomes the Python that Ray asked for, so nothing is lost but time.

As the ranks' parent the server is told by the kernel how each has ended, and by nobody else: Ray ignores it.
For that alone ranks with a GPU have a server too, which has loaded nothing; its children start a new Python.

The server is started by the job's first coordinator on the host, or by a client that finds none. It ends by
itself when Ray's daemon on the host has ended or it has been idle for a while. It listens on a
socket file in a directory that only its user may enter, and what it is sent is JSON. It has loaded torch,
NumPy and Ray and nothing of the user's; it has one Python thread, no CUDA context, and no connection to Ray.

That the process which registers with Ray may be another than the one which Ray started was checked with Ray
2.60.0.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horovod_tune import ray_compat
from horovod_tune.spec import TrialSpec

logger = logging.getLogger(__name__)

# Set to 0, this environment variable makes every rank start as a new Python.
SWITCH = "HOROVOD_TUNE_FORK"

# How long the start of a server may take; it answers when it has loaded torch, which is not waited for.
START_S = 10.0

# How long the server may take to note how a process has ended: it may hear of it after Ray,
# above all on a busy machine.
DEATH_NOTED_S = 2.0

_CLIENT = Path(__file__).with_name("client.py")
# In place of ``python`` on another host: $0 is our Python, $1 the client, then its other arguments, then
# Ray's. Where Ray's Python there is another one than ours, that one runs Ray's command.
_ELSEWHERE = f"""python=$({ray_compat.PYTHON_OF_RAYLET}); python=${{python:-$0}}
if [ "${{python%/*}}" = "${{0%/*}}" ] && [ -f "$1" ]; then exec "$0" -I -S "$@"; fi
shift 4; exec "$python" "$@"
"""
_KNOWN_FIELDS = {"env_vars", "working_dir", "py_modules", "excludes", "config", "py_executable"}


def runtime_env(
    spec: TrialSpec, directory: Path, inherited: Mapping[str, Any], *, elsewhere: bool = False
) -> dict[str, str] | None:
    """Return the Ray runtime environment that lets ``spec``'s ranks be forked on this host, or ``elsewhere``.

    ``directory`` is one that only this user may enter; ``inherited`` is the runtime environment that the
    ranks have in any case. None where forking is switched off, or not known to be safe: in containers and
    in the environments of a package manager, and with a ``py_executable`` of the user's.
    """
    of_others = set(inherited) - _KNOWN_FIELDS
    own = inherited.get("py_executable")
    if (
        sys.platform != "linux"
        or os.environ.get(SWITCH) == "0"
        or of_others
        or (own is not None and str(_CLIENT) not in own)
    ):
        return None
    client = _client(spec, directory)
    if elsewhere:
        python, _, _, *arguments = client
        client = ["sh", "-c", _ELSEWHERE, python, *arguments]
    return {"py_executable": shlex.join(client)}


def start(spec: TrialSpec, directory: Path, environment: Mapping[str, str], raylet: int) -> None:
    """Start the server before the first client comes: it loads torch while Ray starts the first ranks.

    ``environment`` is that in which Ray is going to start them, ``raylet`` the pid of its daemon here.
    """
    # The client ends as soon as it has started the server, which then has no parent.
    command = [*_client(spec, directory), "--start", str(raylet)]
    try:
        subprocess.run(command, env=environment, timeout=START_S, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the fork server did not start; the first ranks try to start it: %s", error)


def death_of(directory: Path, pid: int, *, since: float) -> str:
    """Return how a process that was forked on this host ended, "" where it was not, or is not known.

    ``since`` is when the process started (see `process_start`): pids are used again.
    """
    note = directory / f"{pid}.death"
    # Ray may have heard of the end a moment before the server.
    end_s = time.monotonic() + DEATH_NOTED_S
    while not note.exists() and time.monotonic() < end_s:
        time.sleep(0.02)
    try:
        status, at = note.read_text().split()
        note.unlink()
    except (OSError, ValueError):
        return ""
    if float(at) < since:
        return ""
    code = int(status)
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _client(spec: TrialSpec, directory: Path) -> list[str]:
    # torch reads the number of its threads when it is loaded, before Ray sets it to this value.
    threads = max(1, int(spec.num_cpus_per_slot))
    # A CUDA context cannot be forked, and torch may have made one by being loaded.
    how = "exec" if spec.use_gpu else "fork"
    return [sys.executable, "-I", "-S", str(_CLIENT), str(directory), how, str(threads)]
