"""Reports and their acknowledgements between the coordinator and the training actors on its own host.

Through Ray, a report and its acknowledgement take two calls, a millisecond per rank; here each is one message
on a socket. Reports from other hosts go through Ray, and so does what a socket cannot carry: metrics of
types that msgpack lacks, reports above `MAX_REPORT_BYTES`, checkpoints on storage with a filesystem object.

A rank's process inherits its end of the channel; its training actor hands the other end to the coordinator,
at an address in Linux's abstract namespace, without a file, which exists only while a world begins. The actor
must run as the same user and send the secret that came with the assignment.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass

from horovod_tune.channel.framing import ACKS, REPORTS, Channel, peer_user
from horovod_tune.errors import MetricsError
from horovod_tune.messages import CheckpointPlace, Report

# Half of what Linux buffers for a socket by default (net.core.wmem_default), so sending never has to wait.
MAX_REPORT_BYTES = 100_000
CONNECT_S = 5.0
_SECRET_BYTES = 32


@dataclass(frozen=True)
class ChannelToken:
    """The address to which one actor connects, and the secret that it sends there; valid once."""

    address: bytes
    secret: bytes


class Listener:
    """Accepts the channels of one world's ranks while it begins, and no longer."""

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(b"\0horovod_tune_" + secrets.token_hex(16).encode())
        self._listener.listen(1024)
        self._listener.setblocking(False)
        self._secrets: dict[int, bytes] = {}

    def create_token(self, worker: int) -> ChannelToken:
        self._secrets[worker] = secrets.token_bytes(_SECRET_BYTES)
        return ChannelToken(self._listener.getsockname(), self._secrets[worker])

    def accept(self) -> dict[int, CoordinatorChannel]:
        """Return the channels that have been handed over, by the worker's index, and stop listening."""
        channels: dict[int, CoordinatorChannel] = {}
        with self._listener:
            while True:
                try:
                    end, _ = self._listener.accept()
                except BlockingIOError:
                    return channels
                with end:
                    if (identified := self._identify(end)) is not None:
                        worker, channel = identified
                        channels[worker] = CoordinatorChannel(channel)

    def _identify(self, end: socket.socket) -> tuple[int, socket.socket] | None:
        if peer_user(end) != os.geteuid():
            return None
        end.setblocking(False)  # `recv_fds` ignores its flags
        try:
            shown, ends, _, _ = socket.recv_fds(end, _SECRET_BYTES, 1)
        except OSError:
            return None
        channels = [socket.socket(fileno=each) for each in ends]
        for worker, secret in self._secrets.items():
            if channels and hmac.compare_digest(secret, shown):
                del self._secrets[worker]
                return worker, channels[0]
        for each in channels:
            each.close()
        return None


def hand_over(token: ChannelToken, end: socket.socket) -> None:
    """Give the listener that created ``token`` the coordinator's end of a rank's channel.

    Raises:
        OSError: no process listens there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(CONNECT_S)
        connection.connect(token.address)
        socket.send_fds(connection, [token.secret], [end.fileno()])


class CoordinatorChannel:
    """The coordinator's end of the channel to one rank."""

    def __init__(self, end: socket.socket) -> None:
        self._channel = Channel(end, REPORTS, MAX_REPORT_BYTES)
        self.is_open = True

    def fileno(self) -> int:
        return self._channel.fileno()

    def acknowledge(self, run: int, index: float, checkpoint: CheckpointPlace | None) -> bool:
        """Acknowledge reports up to ``index`` of trial ``run``; return False if this must go through Ray."""
        if not self.is_open or (checkpoint is not None and checkpoint.filesystem is not None):
            return False
        place = None if checkpoint is None else (checkpoint.path, checkpoint.node_id, checkpoint.report)
        return self._channel.send_nowait("acknowledge", run=run, index=index, checkpoint=place)

    def receive(self) -> list[tuple[int, Report]]:
        """Return the reports that have arrived, each with the number of its trial; raises as `Channel`'s."""
        messages, is_open = self._channel.receive(0)
        if not is_open:
            self.close()
        return [
            (each["run"], Report(each["index"], each["metrics"], each["checkpoint_path"]))
            for each in messages
        ]

    def close(self) -> None:
        self.is_open = False
        self._channel.close()


class RankChannel:
    """The rank's end of its channel. Any thread may send; `listen` needs a thread of its own."""

    def __init__(self, end: socket.socket) -> None:
        self._channel = Channel(end, ACKS, MAX_REPORT_BYTES)

    def report(self, run: int, report: Report) -> bool:
        """Send a report; False if it must go through Ray."""
        try:
            self._channel.send("report", run=run, **vars(report))
        except (MetricsError, ValueError, OverflowError, RecursionError, OSError):
            # Too large, nested more deeply than msgpack allows, of a type that only pickle handles, or the
            # channel is closed.
            return False
        return True

    def listen(self, on_ack: Callable[[int, float, CheckpointPlace | None], None]) -> None:
        """Call ``on_ack(run, index, checkpoint)`` for each acknowledgement, until the other end closes.

        The channel is closed when this returns or raises; from then on, everything goes through Ray.
        """
        is_open = True
        try:
            while is_open:
                messages, is_open = self._channel.receive(None)
                for each in messages:
                    place = None
                    if each["checkpoint"] is not None:
                        path, node_id, number = each["checkpoint"]
                        place = CheckpointPlace(path, None, node_id, number)
                    on_ack(each["run"], each["index"], place)
        finally:
            self.close()

    def close(self) -> None:
        self._channel.close()
