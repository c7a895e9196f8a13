"""What a launch prints: few lines on stderr. Its commands' output goes to a log that an error quotes."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from horovod_tune.launch.values import LaunchError

QUOTED_LINES = 15


class StepFailed(LaunchError):
    """A command of the launch failed: quotes the end of its output."""


def say(line: str) -> None:
    """Print a line of this command's own. The job's output goes to stdout."""
    with contextlib.suppress(OSError):  # the terminal has been closed: the work goes on all the same
        print(line, file=sys.stderr, flush=True)


def run_logged(words: Sequence[str], log: Path, *, environment: dict[str, str] | None = None) -> None:
    """Run a command with its output in `log`; an interrupt ends it with this program.

    Raises:
        LaunchError: its program is not installed.
        StepFailed: it failed.
    """
    if shutil.which(words[0]) is None:
        raise LaunchError(f"{words[0]} is not on the PATH of this machine")
    with log.open("ab") as output:
        start = output.tell()
        output.write(f"$ {shlex.join(words)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            list(words),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        try:
            status = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
    if status:
        with log.open("rb") as said:
            said.seek(start)
            lines = said.read().decode(errors="replace").strip().splitlines()
        quoted = "\n".join("  " + line for line in lines[-QUOTED_LINES:])
        raise StepFailed(f"{shlex.join(words)} ended with {status}:\n{quoted}\nThe whole log: {log}")
