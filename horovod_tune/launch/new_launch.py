"""What a launch begins with, whatever its target: the script as read, a name that nobody has, its record."""

from __future__ import annotations

import argparse
import getpass
import os
import socket
import time
from pathlib import Path
from typing import Any

from horovod_tune.launch.launch_record import LaunchRecord, new_name, refuse_name_in_use
from horovod_tune.launch.script import Script, read_command


def script_of(arguments: argparse.Namespace) -> Script:
    """Return the script after ``--``, checked.

    Raises:
        LaunchError: it cannot run as it stands.
    """
    known = arguments.launch_options._option_string_actions
    return read_command(arguments.command, launch_options=known)


def record_of(arguments: argparse.Namespace, script: Script, **more: Any) -> LaunchRecord:
    """Return the record of a new launch, not saved yet.

    Raises:
        LaunchError: its name is in use.
    """
    name = arguments.name or new_name(script.path.name)
    refuse_name_in_use(name)
    by = f"{getpass.getuser()}@{socket.gethostname()}"
    return LaunchRecord(name, arguments.target, list(arguments.command), time.time(), user=by, **more)


def write_private(path: Path, text: str) -> None:
    """Write a file for this user's eyes only, over a former one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
