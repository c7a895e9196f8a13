"""Frames between a TPU host's actor and each of its ranks, over a pair of stream sockets: data, never code.

Both ends are made in this process tree and inherited, so there is no port or path to connect to. A frame is
four bytes of length and a msgpack map. What a rank sends is checked against `RANK_MESSAGES` before it is
used, and never unpickled.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from typing import Any

import msgpack

from horovod_tune.channel.packing import MalformedMessage, pack, unpack
from horovod_tune.errors import MetricsError
from horovod_tune.messages import FailureKind

MAX_FRAME_BYTES = 1 << 30
# The largest report; larger data belongs into a checkpoint.
MAX_REPORT_BYTES = 64 << 20
_LENGTH = struct.Struct(">I")

# The kinds of messages that a rank may send, and the type of each field.
RANK_MESSAGES: dict[str, dict[str, type | tuple[type, ...]]] = {
    "alive": {"operations": int},
    "report": {"index": int, "metrics": dict, "checkpoint_path": (str, type(None))},
    "finished": {},
    "stopped": {},
    "failed": {"failure_kind": int, "traceback": str},
    "fetch": {"path": str, "node_id": (str, type(None))},
    "reset_done": {"problems": (list, tuple)},
    "stack": {"stack": str, "in_report": bool},
}
_FAILURES = {kind.value for kind in FailureKind}


def check_rank_message(message: Any) -> dict[str, Any]:
    """Return a rank's message after checking it.

    Raises:
        MalformedMessage: it is of an unknown kind, lacks a field, has one too many, or one of the wrong type.

    >>> check_rank_message({"kind": "alive", "operations": 3})
    {'kind': 'alive', 'operations': 3}
    """
    fields = RANK_MESSAGES.get(str(message.get("kind"))) if type(message) is dict else None
    if fields is None or set(message) - {"kind"} != set(fields):
        raise MalformedMessage(f"{message!r:.200} is not a message of a known kind with its fields")
    for name, kinds in fields.items():
        # True is an int to Python, but not a number here.
        if not isinstance(message[name], kinds) or (isinstance(message[name], bool) and kinds is not bool):
            raise MalformedMessage(
                f"{message!r:.200} has a field of the wrong type: {name} is {message[name]!r:.80}"
            )
    if message["kind"] == "failed" and message["failure_kind"] not in _FAILURES:
        raise MalformedMessage(f"{message!r:.200} has an unknown failure_kind")
    return message


class Channel:
    """One end of a pair of stream sockets. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message whole.

        Raises:
            MetricsError: a field has a value that cannot be sent.
            OSError: the other end is closed.
        """
        data = pack({"kind": kind, **fields})
        if len(data) > MAX_FRAME_BYTES or (kind == "report" and len(data) > MAX_REPORT_BYTES):
            raise MetricsError(
                f"a report may take {MAX_REPORT_BYTES} bytes, got {len(data)}; put more into a checkpoint"
            )
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, timeout_s: float) -> tuple[list[dict[str, Any]], bool]:
        """Return the messages that arrive within ``timeout_s``, and whether the other end is still open."""
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return [], True
        try:
            data = self._socket.recv(1 << 20)
        except ConnectionError:
            data = b""
        self._buffer += data
        return self._whole_messages(), bool(data)

    def _whole_messages(self) -> list[dict[str, Any]]:
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise MalformedMessage(f"a frame of {length} bytes is larger than {MAX_FRAME_BYTES}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            try:
                messages.append(unpack(bytes(self._buffer[_LENGTH.size : end])))
            except (ValueError, msgpack.exceptions.UnpackException, TypeError) as error:
                raise MalformedMessage(
                    f"a frame of {length} bytes is not a msgpack message: {error}"
                ) from error
            del self._buffer[:end]
        return messages

    def close(self) -> None:
        self._socket.close()
