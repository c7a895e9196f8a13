"""Runs in the host actor: forwards what the ranks print, and collects it in chunks for the trial's logs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from horovod_tune.messages import LogChunk

CHUNK_BYTES = 1 << 16


class RankOutput:
    """Takes the ranks' output in one thread; others may call `send`, which passes chunks to ``send``."""

    def __init__(self, send: Callable[[LogChunk], None]) -> None:
        self._send = send
        self._gathered: dict[int, bytearray] = {}
        self._gathering = threading.Lock()

    def clear(self) -> None:
        """Forget what has not been sent: it belongs to the previous trial."""
        with self._gathering:
            self._gathered = {}

    def take(self, rank: int, text: bytes) -> None:
        """Take what a rank has printed."""
        # One write for each block, which Ray forwards to the driver.
        prefix = f"[rank {rank}] "
        lines = text.decode("utf-8", "replace").splitlines()
        sys.stdout.write("".join(f"{prefix}{line}\n" for line in lines))
        sys.stdout.flush()
        with self._gathering:
            log = self._gathered.setdefault(rank, bytearray())
            log += text
        if len(log) > CHUNK_BYTES:
            self.send(rank)

    def send(self, rank: int) -> None:
        """Send what the rank has printed since its last chunk, if anything."""
        with self._gathering:
            text = self._gathered.pop(rank, None)
        if text:
            self._send(LogChunk(rank, bytes(text)))
