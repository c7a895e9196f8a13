"""The way from this machine to the head of a cluster: ssh and rsync, each word quoted once."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horovod_tune.errors import HorovodTuneError
from horovod_tune.launch.values import LaunchError

CONNECT_TIMEOUT_S = 10
# The exit status of ssh itself when there is no connection.
SSH_FAILED = 255


class Unreachable(HorovodTuneError, OSError):
    """There is no connection to the head now; there may be one later."""


@dataclass(frozen=True)
class HeadShell:
    """One machine that is reached by ssh."""

    host: str
    user: str
    key: str
    known_hosts: str

    def ssh_words(self) -> list[str]:
        """Return ssh with its options, without the host."""
        options = [
            "BatchMode=yes",
            f"ConnectTimeout={CONNECT_TIMEOUT_S}",
            "ServerAliveInterval=5",
            "ServerAliveCountMax=3",
            "StrictHostKeyChecking=accept-new",
            f"UserKnownHostsFile={self.known_hosts}",
            "LogLevel=ERROR",
        ]
        words = ["ssh", *(word for option in options for word in ("-o", option))]
        if self.key:
            words += ["-i", str(Path(self.key).expanduser()), "-o", "IdentitiesOnly=yes"]
        return words

    def command_words(self, command: str) -> list[str]:
        """Return the words that run a shell line on the head, in a login shell: Python is on its PATH."""
        return [*self.ssh_words(), f"{self.user}@{self.host}", "bash -lc " + shlex.quote(command)]

    def run(self, command: str, *, timeout_s: float = 120.0) -> str:
        """Run a shell line on the head and return its standard output.

        Raises:
            Unreachable: there is no connection, or no answer in time.
            LaunchError: the line failed there; quotes its output.
        """
        try:
            ran = subprocess.run(
                self.command_words(command),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                start_new_session=True,  # an interrupt of this terminal is this program's to handle
            )
        except subprocess.TimeoutExpired:
            raise Unreachable(f"{self.host} gave no answer in {timeout_s:g} s") from None
        if ran.returncode == SSH_FAILED:
            raise Unreachable(_last_lines(ran.stderr, 1) or f"ssh to {self.host} failed")
        if ran.returncode:
            raise LaunchError(f"on {self.host}: {_last_lines(ran.stderr or ran.stdout, 8)}")
        return ran.stdout

    def ask(self, *words: str, timeout_s: float = 120.0) -> list[dict[str, Any]]:
        """Run `horovod_tune.node.head_job` with `words` and return its messages."""
        return read_messages(self.run(head_job_line(*words), timeout_s=timeout_s).splitlines())

    def stream(self, *words: str) -> Iterator[dict[str, Any]]:
        """Run `horovod_tune.node.head_job` and give its messages as they come.

        Raises:
            Unreachable: the connection ended.
            LaunchError: the program failed.
        """
        process = subprocess.Popen(
            self.command_words(head_job_line(*words)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None and process.stderr is not None
            for line in process.stdout:
                yield from read_messages([line])
            said = process.stderr.read()
            status = process.wait(timeout=30)
        finally:
            process.kill()
            process.wait()
        if status == SSH_FAILED:
            raise Unreachable(_last_lines(said, 1) or "the connection ended")
        if status:
            raise LaunchError(f"on {self.host}: {_last_lines(said, 8)}")

    def copy(self, source: str, target: str, *, exact: bool = False, log: Path | None = None) -> None:
        """Copy with rsync; a path on the head is ``:PATH``. `exact` compares what is there by content.

        Raises:
            Unreachable: there is no connection.
            LaunchError: rsync failed.
        """
        if shutil.which("rsync") is None:
            raise LaunchError("rsync is not on the PATH of this machine: install it")
        at = f"{self.user}@{self.host}"
        ends = [at + end if end.startswith(":") else end for end in (source, target)]
        words = [
            "rsync",
            "-rltp",
            "--partial",
            *(["--checksum"] if exact else []),
            "-e",
            shlex.join(self.ssh_words()),
            *ends,
        ]
        ran = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True
        )
        if log is not None:
            with log.open("a") as lines:
                lines.write(f"$ {shlex.join(words)}\n{ran.stdout}{ran.stderr}")
        if ran.returncode in (SSH_FAILED, 10, 12, 30, 35):  # rsync's words for a connection that broke
            raise Unreachable(_last_lines(ran.stderr, 1))
        if ran.returncode:
            raise LaunchError(f"rsync {ends[0]} {ends[1]}: {_last_lines(ran.stderr, 4)}")


def head_job_line(*words: str) -> str:
    """Return the shell line that calls the head's program."""
    return "exec " + shlex.join(["python", "-m", "horovod_tune.node.head_job", *words])


def read_messages(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Return the JSON messages among lines that a login shell may have added its own to.

    >>> read_messages(["Welcome to n1", '{"submitted": "a"}'])
    [{'submitted': 'a'}]
    """
    messages = []
    for line in lines:
        if line.startswith("{"):
            try:
                messages.append(dict(json.loads(line)))
            except ValueError:
                continue
    return messages


def _last_lines(text: str, count: int) -> str:
    return "\n".join([line for line in text.strip().splitlines() if line.strip()][-count:])
