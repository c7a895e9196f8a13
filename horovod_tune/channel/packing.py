"""Turns messages into bytes and back: msgpack, with tuples, long integers and NumPy arrays. Data only."""

from __future__ import annotations

import functools
import sys
from typing import Any

import msgpack

from horovod_tune.errors import HorovodTuneError, MetricsError

_TUPLE, _ARRAY, _INTEGER = 1, 2, 3
# How deep tuples may be nested in a received message. Each level is a nested call of msgpack's C code,
# which takes 40 kB of stack: at 200 levels, the process dies with SIGSEGV. msgpack itself limits lists and
# dicts to 512 levels.
MAX_TUPLES_DEEP = 64


class MalformedMessage(HorovodTuneError, ValueError):
    """A process sent bytes that are not a message, or a message of an unknown kind."""


def pack(message: dict[str, Any]) -> bytes:
    """Return a message as bytes: numbers, text, bytes, None; dicts, lists, tuples and NumPy arrays of them.

    Raises:
        MetricsError: it contains a value of another type.

    >>> unpack(pack({"kind": "alive", "shape": (1, 2)}))
    {'kind': 'alive', 'shape': (1, 2)}
    """
    packed: bytes = msgpack.packb(message, default=_pack_more, strict_types=True)
    return packed


def unpack(data: bytes, depth: int = 0) -> Any:
    """Return the message in ``data``.

    Raises:
        ValueError, TypeError, msgpack.exceptions.UnpackException: it is not a message, or nested too deeply.
    """
    if depth > MAX_TUPLES_DEEP:
        raise ValueError(f"tuples nested more than {MAX_TUPLES_DEEP} deep")
    more = functools.partial(_unpack_more, depth=depth)
    return msgpack.unpackb(data, ext_hook=more, strict_map_key=False)


def _pack_more(value: Any) -> msgpack.ExtType:
    if type(value) is tuple:
        return msgpack.ExtType(_TUPLE, pack(list(value)))  # type: ignore[arg-type]
    if type(value) is int:  # of more than 64 bits
        return msgpack.ExtType(_INTEGER, str(value).encode())
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and (type(value) is numpy.ndarray or isinstance(value, numpy.generic))
    # Structured arrays, and subclasses such as masked arrays, are more than a type's name and bytes.
    if is_array and value.dtype.kind != "V" and not value.dtype.hasobject:
        return msgpack.ExtType(_ARRAY, pack([value.dtype.str, list(value.shape), value.tobytes()]))  # type: ignore[arg-type]
    raise MetricsError(
        "a rank can send only numbers, text, bytes, None, and lists, tuples, dicts and plain NumPy arrays "
        f"of them, got {type(value).__module__}.{type(value).__qualname__}: {value!r:.80}"
    )


def _unpack_more(code: int, data: bytes, *, depth: int) -> Any:
    if code == _TUPLE:
        return tuple(unpack(data, depth + 1))
    if code == _INTEGER:
        return int(data)
    if code == _ARRAY:
        import numpy

        dtype, shape, content = unpack(data, depth + 1)
        return numpy.frombuffer(content, dtype=numpy.dtype(dtype)).reshape(shape).copy()
    raise ValueError(f"unknown msgpack extension type {code}")
