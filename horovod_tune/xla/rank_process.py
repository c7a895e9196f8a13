"""The host actor's record of one rank: what it sent, printed and computed."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import psutil

from horovod_tune.channel.framing import Channel

# How the long last line of Python's fault handler begins.
_NOISE = "Extension modules: "


@dataclass
class RankProcess:
    """One rank, as its host actor sees it."""

    ordinal: int
    world_size: int
    local_ordinal: int
    local_size: int
    pid: int
    process_started: float
    channel: Channel
    output: int | None
    last_heard: float = field(default_factory=time.monotonic)
    cpu_s: float = -1.0
    messages: int = 0
    operations: int = 0
    has_ended: bool = False
    tail: bytearray = field(default_factory=bytearray)

    def send(self, kind: str, **fields: Any) -> None:
        """Send the rank a message, unless it has ended, which the supervisor reports."""
        with contextlib.suppress(OSError):
            self.channel.send(kind, **fields)


def family_cpu_s(pid: int) -> float:
    """Return the CPU time in s of a process, of all below it, and of those that they have waited for."""
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0
    used_s = 0.0
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = each.cpu_times()
            used_s += times.user + times.system + times.children_user + times.children_system
    return used_s


def last_output(tail: bytes) -> str:
    lines = tail.decode("utf-8", "replace").splitlines()
    return "\n".join(line for line in lines if not line.startswith(_NOISE)).strip()
