"""One end of a stream socket between two processes of one host: whole, checked messages. Data, never code.

A frame is four bytes of length and a msgpack map with the message's kind and fields. Before a message is
used, it is checked against the schema of what the other end may send. Frames are never unpickled.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import sys
import threading
from collections.abc import Mapping
from typing import Any

import msgpack

from horovod_tune.channel.packing import MalformedMessage, pack, unpack
from horovod_tune.messages import FailureKind

# By kind: the type of each field.
Schema = Mapping[str, Mapping[str, type | tuple[type, ...]]]

_NUMBER = (int, float)
_NO = type(None)
# The answer to a request with the same id, or the error with which it failed.
_REPLY: Mapping[str, type | tuple[type, ...]] = {"id": int, "value": object, "error": str}

# What a rank sends the coordinator on its own host.
REPORTS: Schema = {
    "report": {"run": int, "index": int, "metrics": dict, "checkpoint_path": (str, _NO)},
}
# What a rank sends its training actor. The coordinator unpickles metrics of types that msgpack lacks.
RANK_MESSAGES: Schema = {
    **REPORTS,
    "pickled_report": {"run": int, "index": int, "pickled": bytes, "checkpoint_path": (str, _NO)},
    "finished": {"rank": int, "has_returned": int},
    "failed": {"rank": int, "failure_kind": int, "traceback": str},
    "needs_world": {"error": str, "stalled": str},
    "awaited": {"names": dict},
    "imports": {"seconds": dict},
    "long_wait": {"rank": int, "report": int},
    "fetch": {"id": int, "path": str, "node_id": str, "target": (str, _NO)},
    "stall_report": {"id": int},
    "reply": _REPLY,
}
# What a rank receives from the coordinator. `checkpoint` holds a place's path, node_id and report.
ACKS: Schema = {
    "acknowledge": {"run": int, "index": _NUMBER, "checkpoint": (tuple, _NO)},
}
# What a rank receives from the training actor that started it, whose pickles it may load.
ACTOR_MESSAGES: Schema = {
    "begin": {"pickled": bytes},
    "acknowledge": {"run": int, "index": _NUMBER, "pickled_checkpoint": bytes},
    "stop": {},
    "close_world": {},
    "break_world": {"number": int},
    "rejoin": {"pickled": bytes},
    "offer_change": {"number": int},
    "stalled": {"names": dict},
    "ask": {"id": int, "request": str, "arguments": (list, tuple), "named": dict},
    "reply": _REPLY,
}
MAX_FRAME_BYTES = 1 << 30
# How many bytes are read at a time.
_READ_BYTES = 1 << 20
_LENGTH = struct.Struct(">I")


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int.from_bytes(credentials[4:8], sys.byteorder)


def check(message: Any, schema: Schema) -> dict[str, Any]:
    """Return a message; MalformedMessage if its kind is unknown, or a field is missing, extra or mistyped.

    >>> check({"kind": "awaited", "names": {1: "loss"}}, RANK_MESSAGES)
    {'kind': 'awaited', 'names': {1: 'loss'}}
    """
    fields = schema.get(str(message.get("kind"))) if type(message) is dict else None
    if fields is None or set(message) - {"kind"} != set(fields):
        raise MalformedMessage(f"{message!r:.200} is not a message of a known kind, or has the wrong fields")
    for name, kinds in fields.items():
        # True is an int to Python, but not a number here.
        if not isinstance(message[name], kinds) or (isinstance(message[name], bool) and kinds is not object):
            raise MalformedMessage(
                f"{message!r:.200} has a field of the wrong type: {name} is {message[name]!r:.80}"
            )
    if message["kind"] == "failed" and message["failure_kind"] not in {kind.value for kind in FailureKind}:
        raise MalformedMessage(f"{message!r:.200} has an unknown failure_kind")
    return message


def frame(kind: str, **fields: Any) -> bytes:
    """Return a message as the bytes of its frame; MetricsError if a field cannot be sent."""
    data = pack({"kind": kind, **fields})
    return _LENGTH.pack(len(data)) + data


class Channel:
    """One end of a stream socket. Any thread may send; one thread receives.

    Args:
        end: a connected, blocking stream socket.
        receives: the messages that the other end may send.
        max_bytes: the largest message that either end may send.
    """

    def __init__(self, end: socket.socket, receives: Schema, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._socket = end
        self._max_bytes, self._receives = max_bytes, receives
        self._sending = threading.Lock()
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message whole.

        Raises:
            MetricsError: a field has a value that cannot be sent.
            ValueError: the message is too large, or nested too deeply.
            OSError: the other end is closed.
        """
        data = frame(kind, **fields)
        if len(data) > self._max_bytes:
            raise ValueError(f"a message has {len(data)} bytes, more than {self._max_bytes}")
        with self._sending:
            self._socket.sendall(data)

    def send_nowait(self, kind: str, **fields: Any) -> bool:
        """Send a message without waiting; False if the other end is closed or has not read for a while.

        If only part of it was sent, nothing more can be sent, but messages can still be received.
        """
        data = frame(kind, **fields)
        with self._sending:
            try:
                sent = self._socket.send(data, socket.MSG_DONTWAIT)
            except OSError:
                return False
            if sent < len(data):
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)
            return sent == len(data)

    def receive(self, timeout_s: float | None) -> tuple[list[dict[str, Any]], bool]:
        """Return the messages that arrive within ``timeout_s``, and True if the other end is still open.

        ``timeout_s`` is for the first bytes; None waits until there are some.

        Raises:
            MalformedMessage: the other end sent something that it may not send.
        """
        try:
            if timeout_s is not None:
                # `select.select` fails for descriptors above 1023, and a large world has that many.
                waits = select.poll()
                waits.register(self._socket, select.POLLIN)
                if not waits.poll(1000.0 * timeout_s):
                    return [], True
            data = self._socket.recv(_READ_BYTES)
        except (OSError, ValueError):  # the other end was closed with unread data, or this one is closed
            data = b""
        self._buffer += data
        return self._whole_messages(), bool(data)

    def has_data(self) -> bool:
        """Return True if a call of `receive` would not wait."""
        waits = select.poll()
        waits.register(self._socket, select.POLLIN)
        return bool(waits.poll(0))

    def _whole_messages(self) -> list[dict[str, Any]]:
        messages = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > self._max_bytes:
                raise MalformedMessage(f"a frame of {length} bytes is larger than {self._max_bytes}")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            try:
                message = unpack(bytes(self._buffer[_LENGTH.size : end]))
            except (ValueError, msgpack.exceptions.UnpackException, TypeError) as error:
                raise MalformedMessage(
                    f"a frame of {length} bytes is not a msgpack message: {error}"
                ) from error
            messages.append(check(message, self._receives))
            del self._buffer[:end]
        return messages

    def close(self) -> None:
        """Close this end; a `receive` that waits in another thread returns."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
