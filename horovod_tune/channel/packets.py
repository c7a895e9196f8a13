"""Packets between the coordinator and the ranks on its own host, over sockets that never leave the machine.

Through Ray, a report and its release take two calls, a millisecond for every rank; here they take one packet
each. The listener's address is in Linux's abstract namespace, without a file, and exists only while the ranks
of one world connect. A rank must run as the same user and show the secret that came with its assignment. A
packet is a msgpack message, checked and never unpickled.

What does not fit into a packet goes through Ray, as it does for ranks on other hosts: metrics of types that
msgpack does not have, reports above `MAX_PACKET_BYTES`, checkpoints on storage with a filesystem object.
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

from horovod_tune.channel.packing import MalformedMessage, pack, unpack
from horovod_tune.errors import MetricsError
from horovod_tune.messages import CheckpointPlace, Report

# Half of what Linux lets a packet have by default (net.core.wmem_default).
MAX_PACKET_BYTES = 100_000
CONNECT_S = 5.0
_CREDENTIALS = struct.Struct("3i")
_SECRET_BYTES = 32


@dataclass(frozen=True)
class ChannelToken:
    """The address that a rank connects to and the secret that it shows there; for one rank, used once."""

    address: bytes
    secret: bytes


class CoordinatorChannel:
    """The coordinator's end of the channel to one rank."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self.is_open = True

    def fileno(self) -> int:
        return self._socket.fileno()

    def release(self, run: int, index: float, checkpoint: CheckpointPlace | None) -> bool:
        """Let the rank's reports up to ``index`` of trial ``run`` return; False if Ray must carry it."""
        if not self.is_open or (checkpoint is not None and checkpoint.filesystem is not None):
            return False
        place = None if checkpoint is None else (checkpoint.path, checkpoint.node_id, checkpoint.report)
        packet = pack({"run": run, "index": None if index == math.inf else int(index), "place": place})
        try:
            self._socket.send(packet, socket.MSG_DONTWAIT)
        except OSError:
            return False  # the rank has ended, or has not read for a while: Ray's call tells which
        return True

    def receive(self) -> list[tuple[int, Report]]:
        """Return the reports that have arrived, each with the number of its trial; does not wait.

        Raises:
            MalformedMessage: the rank sent something other than a report.
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
    """Accepts the ranks of one world while they connect, and no longer."""

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
        """Return the channels of the workers that have connected, by index, and stop listening."""
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
    """The rank's end. Any thread may send; `listen` has a thread of its own and sleeps between packets."""

    def __init__(self, token: ChannelToken) -> None:
        """Connect and show the secret.

        Raises:
            OSError: no coordinator listens there on this host.
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
        """Send a report; False if it must go through Ray."""
        fields = {"index": report.index, "metrics": report.metrics, "path": report.checkpoint_path}
        try:
            packet = pack({"run": run, **fields})
        except (MetricsError, ValueError, OverflowError, RecursionError):
            return False  # nested more deeply than msgpack allows, or of a type that only pickle handles
        if len(packet) > MAX_PACKET_BYTES:
            return False
        try:
            self._socket.send(packet)
        except OSError:
            return False
        return True

    def listen(self, on_release: Callable[[int, float, CheckpointPlace | None], None]) -> None:
        """Call ``on_release(run, index, checkpoint)`` for each packet, until the coordinator has ended.

        However it ends, it closes the channel: releases then come through Ray, and no report waits for one
        that nobody would receive.
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
        except OSError:  # the coordinator has ended, or this end is closed
            return b""

    def close(self) -> None:
        """Close the channel; `listen` returns in its thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _check_report(packet: bytes) -> tuple[int, Report]:
    try:
        message = unpack(packet)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise MalformedMessage(f"{len(packet)} bytes are not a msgpack message: {error}") from error
    expected: dict[str, type | tuple[type, ...]] = {
        "run": int,
        "index": int,
        "metrics": dict,
        "path": (str, type(None)),
    }
    if type(message) is not dict or set(message) != set(expected):
        raise MalformedMessage(f"{message!r:.200} is not a report")
    for name, kinds in expected.items():
        if not isinstance(message[name], kinds) or isinstance(message[name], bool):
            raise MalformedMessage(f"{message!r:.200} is not a report: {name} is {message[name]!r:.80}")
    return message["run"], Report(message["index"], message["metrics"], message["path"])
