"""The short way between the coordinator and the ranks on its own host: sockets that never leave the machine.

A report and its release through two Ray calls cost a millisecond for every rank; here they are a packet
each. The listener has a name without a file (Linux's abstract namespace) and lives only while the ranks of
one world take their places. Who connects has to be a process of the same user and must show the secret that
came to it in its assignment; a packet is a msgpack message that is checked, and is never unpickled.

What does not fit goes through Ray as it does for ranks on other hosts: metrics of other types than msgpack
has, reports above `MAX_PACKET_BYTES`, checkpoints on storage that has a filesystem object.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import os
import secrets
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

import msgpack

from horovod_tune.channel.packing import pack, unpack
from horovod_tune.errors import HorovodTuneError, MetricsError
from horovod_tune.messages import CheckpointPlace, Report

MAX_PACKET_BYTES = 100_000
"""Half of what Linux lets a packet have by default (net.core.wmem_default)."""
CONNECT_S = 5.0
_CREDENTIALS = struct.Struct("3i")
_SECRET_BYTES = 32


class MalformedMessage(HorovodTuneError, ValueError):
    """Something came through a channel that no rank of ours sends."""


@dataclass(frozen=True)
class ChannelToken:
    """Where a rank connects, and the secret that it shows there; made for one rank and used once."""

    address: bytes
    secret: bytes


class CoordinatorChannel:
    """The coordinator's end of the way to one rank."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self.is_open = True

    def fileno(self) -> int:
        return self._socket.fileno()

    def release(self, run: int, index: float, checkpoint: CheckpointPlace | None) -> bool:
        """Let the rank's reports up to ``index`` of trial ``run`` return; False where it must be a call."""
        if not self.is_open or (checkpoint is not None and checkpoint.filesystem is not None):
            return False
        place = None if checkpoint is None else (checkpoint.path, checkpoint.node_id, checkpoint.report)
        packet = pack({"run": run, "index": None if index == math.inf else int(index), "place": place})
        try:
            self._socket.send(packet, socket.MSG_DONTWAIT)
        except OSError:
            return False  # the rank is gone, or has not read for long: Ray knows more
        return True

    def receive(self) -> list[tuple[int, Report]]:
        """Return the reports that have come, each with the number of its trial; does not wait.

        Raises:
            MalformedMessage: what came is no report.
        """
        reports = []
        while self.is_open:
            try:
                packet = self._socket.recv(MAX_PACKET_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionError:
                packet = b""
            if not packet:
                self.close()
                break
            reports.append(_check_report(packet))
        return reports

    def close(self) -> None:
        self.is_open = False
        self._socket.close()


class Listener:
    """Listens while ranks take their places in a world, and no longer."""

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(b"\0horovod_tune_" + secrets.token_hex(16).encode())
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._secrets: dict[int, bytes] = {}

    def create_token(self, worker: int) -> ChannelToken:
        self._secrets[worker] = secrets.token_bytes(_SECRET_BYTES)
        return ChannelToken(self._listener.getsockname(), self._secrets[worker])

    def accept(self) -> dict[int, CoordinatorChannel]:
        """Return the channels of the workers that have connected, and listen no more."""
        channels: dict[int, CoordinatorChannel] = {}
        with self._listener:
            while True:
                try:
                    end, _ = self._listener.accept()
                except BlockingIOError:
                    return channels
                worker = self._identify(end)
                if worker is None:
                    end.close()
                else:
                    channels[worker] = CoordinatorChannel(end)

    def _identify(self, end: socket.socket) -> int | None:
        _, user, _ = _CREDENTIALS.unpack(
            end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if user != os.geteuid():
            return None
        try:
            shown = end.recv(_SECRET_BYTES + 1, socket.MSG_DONTWAIT)
        except OSError:
            return None
        found = [each for each, secret in self._secrets.items() if hmac.compare_digest(secret, shown)]
        for worker in found:
            del self._secrets[worker]
        return found[0] if found else None


class RankChannel:
    """The rank's end. Any thread may send; `listen` runs in a thread of its own, asleep between packets."""

    def __init__(self, token: ChannelToken) -> None:
        """Connect and show the secret.

        Raises:
            OSError: there is no such coordinator on this host.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(CONNECT_S)
            self._socket.connect(token.address)
            self._socket.send(token.secret)
            self._socket.settimeout(None)
        except OSError:
            self._socket.close()
            raise

    def report(self, run: int, report: Report) -> bool:
        """Send a report; False where it has to go another way."""
        fields = {"index": report.index, "metrics": report.metrics, "path": report.checkpoint_path}
        try:
            packet = pack({"run": run, **fields})
        except (MetricsError, ValueError, OverflowError, RecursionError):
            return False  # nested deeper than msgpack goes, or of a type that only pickle knows
        if len(packet) > MAX_PACKET_BYTES:
            return False
        try:
            self._socket.send(packet)
        except OSError:
            return False
        return True

    def listen(self, on_release: Callable[[int, float, CheckpointPlace | None], None]) -> None:
        """Call ``on_release(run, index, checkpoint)`` for each packet, until the coordinator is gone.

        However it ends, the channel is closed with it: releases then come through Ray, and no report waits for
        one that nobody would hear.
        """
        try:
            while packet := self._next_packet():
                message = unpack(packet)
                index, place = message["index"], message["place"]
                checkpoint = None if place is None else CheckpointPlace(place[0], None, place[1], place[2])
                on_release(message["run"], math.inf if index is None else index, checkpoint)
        finally:
            self.close()

    def _next_packet(self) -> bytes:
        try:
            return self._socket.recv(MAX_PACKET_BYTES)
        except OSError:  # the coordinator is gone, or this end is closed
            return b""

    def close(self) -> None:
        """Leave; `listen` returns in its thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _check_report(packet: bytes) -> tuple[int, Report]:
    try:
        message = unpack(packet)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise MalformedMessage(f"{len(packet)} bytes that are no msgpack: {error}") from error
    expected: dict[str, type | tuple[type, ...]] = {
        "run": int,
        "index": int,
        "metrics": dict,
        "path": (str, type(None)),
    }
    if type(message) is not dict or set(message) != set(expected):
        raise MalformedMessage(f"{message!r:.200} is no report")
    for name, kinds in expected.items():
        if not isinstance(message[name], kinds) or isinstance(message[name], bool):
            raise MalformedMessage(f"{message!r:.200} is no report: {name} is {message[name]!r:.80}")
    return message["run"], Report(message["index"], message["metrics"], message["path"])
