"""Runs in each rank: checks and converts the arguments of `report()`: metrics and a checkpoint."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from horovod_tune.errors import MetricsError

_PLAIN = (bool, int, float, str, bytes, type(None))
# The types of keys that Tune's loggers accept in a dict within a metric, since json rejects all others.
_KEYS = (bool, int, float, str, type(None))
# How deep lists, tuples and dicts may be nested in a metric.
MAX_DEPTH = 32
# The approximate maximum for the metrics of one report; larger results belong in a checkpoint.
MAX_METRICS_BYTES = 64 << 20


def merge_metrics(metrics: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a call of `report(metrics, **keywords)` or ``ray.tune.report``.

    Raises:
        MetricsError: ``metrics`` is not a dict.
    """
    if metrics is not None and not isinstance(metrics, Mapping):
        raise MetricsError(
            f"the argument metrics of report() must be a dict, got {type(metrics).__name__}; a metric that "
            "is called 'metrics' goes into that dict: report({'metrics': ...})"
        )
    return {**(metrics or {}), **keywords}


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics with NumPy scalars (also as keys) and one-element tensors as plain Python values.

    Raises:
        MetricsError: a name is not a string, a value or key cannot be sent, or the metrics are too large.

    >>> import numpy
    >>> plain_metrics({"loss": numpy.float32(0.5), "epoch": 1, "name": "a"})
    {'loss': 0.5, 'epoch': 1, 'name': 'a'}
    """
    plain, total = {}, 0
    for given, value in metrics.items():
        name = _plain_scalar(given)
        if type(name) is not str:
            raise MetricsError(f"the name of a metric must be a string, got {given!r:.200}")
        _check_plain(repr(name), name)
        plain[name] = _plain_value(name, value)
        if isinstance(plain[name], complex):
            raise MetricsError(
                f"metric {name!r} is a complex number, which Tune cannot compare; report its abs()"
            )
        total += _size(plain[name])
        if total > MAX_METRICS_BYTES:
            raise MetricsError(
                f"the metrics of a report may take at most {MAX_METRICS_BYTES >> 20} MB; with {name!r}, "
                "these take more. Put large results into a checkpoint"
            )
    return plain


def _size(value: Any) -> int:
    """Return the approximate size of a metric in bytes."""
    if isinstance(value, (str, bytes)):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_size(key) + _size(item) for key, item in value.items())
    if type(value) in (list, tuple):
        return sum(map(_size, value))
    return int(getattr(value, "nbytes", 8))


def _plain_value(name: str, value: Any, depth: int = 0) -> Any:
    if type(value) in _PLAIN:
        _check_plain(repr(name), value)
        return value
    if depth >= MAX_DEPTH and isinstance(value, (Mapping, list, tuple)):
        raise MetricsError(f"metric {name[:60]!r}... is nested more than {MAX_DEPTH} deep")
    if isinstance(value, Mapping):
        plain = {}
        for given, item in value.items():
            key = _plain_scalar(given)
            if type(key) not in _KEYS:
                raise MetricsError(
                    f"metric {name!r} has a dict with the key {given!r:.200}, of type "
                    f"{type(given).__name__}; keys must be strings, numbers, True, False or None"
                )
            _check_plain(f"{name!r}, in the key of a dict,", key)
            plain[key] = _plain_value(f"{name}/{key}", item, depth + 1)
        return plain
    if isinstance(value, (list, tuple)):  # also a named tuple
        kind = list if isinstance(value, list) else tuple
        return kind(_plain_value(f"{name}[{i}]", item, depth + 1) for i, item in enumerate(value))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise MetricsError(
                f"metric {name!r} is a tensor of shape {tuple(value.shape)}; report a number, or a list "
                "made with .tolist()"
            )
        if value.is_meta:
            raise MetricsError(f"metric {name!r} is a tensor on the meta device, which has no value")
        return value.item()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, (numpy.generic, numpy.ndarray)) and value.ndim == 0:
        item = value.item()  # of a longdouble, again a longdouble; of an array of objects, anything
        if isinstance(item, (numpy.longdouble, numpy.clongdouble)):
            item = float(item) if isinstance(item, numpy.longdouble) else complex(item)
        return _plain_value(name, item, depth)
    if isinstance(value, Decimal):  # Tune multiplies metrics by floats
        return float(value)
    value = _plain_scalar(value)  # such as a member of an IntEnum
    if type(value) in _PLAIN:
        return _plain_value(name, value, depth)
    try:
        pickled = pickle.dumps(value)
    except Exception as error:  # a user's __reduce__ may raise anything
        raise MetricsError(
            f"metric {name!r} cannot be sent to Tune: {type(value).__name__}: {error}"
        ) from error
    if b"__main__" in pickled:
        raise MetricsError(
            f"metric {name!r} is of type {type(value).__name__}, which only your script knows; report a "
            "number, a string, or a list or dict of them"
        )
    return value


def _plain_scalar(key: Any) -> Any:
    """Return a key or value; as a plain value if it is NumPy's, or of a subclass of str, int or float."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(key, numpy.generic):
        key = key.item()
    if type(key) in _KEYS:
        return key
    # By the base class's method, as json does: str() of a member of an Enum is its name.
    if isinstance(key, str):
        return str.__str__(key)
    if isinstance(key, int):
        return int.__int__(key)
    if isinstance(key, float):
        return float.__float__(key)
    return key


def _check_plain(name: str, value: Any) -> None:
    """Raise MetricsError for numbers and text that Tune or its loggers cannot store."""
    if type(value) is int and not -(2**63) <= value < 2**64:
        raise MetricsError(
            f"metric {name} is an integer of {value.bit_length()} bits, but Tune accepts at most 64; "
            "report it as a float, or as a string"
        )
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise MetricsError(
                f"metric {name} is not valid text: {error}; bytes that were read as text may be the reason"
            ) from error


def checkpoint_path(checkpoint: Any) -> str | None:
    """Return the absolute path of a reported checkpoint's directory; None if there is none.

    Raises:
        MetricsError: it is not a directory on this host.
    """
    if checkpoint is None:
        return None
    # First, since Ray's Checkpoint is an os.PathLike whose __fspath__ raises.
    if hasattr(checkpoint, "path") and hasattr(checkpoint, "filesystem"):
        kind = getattr(checkpoint.filesystem, "type_name", "local")
        if kind != "local":
            raise MetricsError(
                f"checkpoint must be a directory on this host, got {checkpoint!r}, which is on a {kind} "
                "file system: report what checkpoint.to_directory() returns"
            )
        checkpoint = checkpoint.path
    if not isinstance(checkpoint, (str, os.PathLike)):
        raise MetricsError(
            "checkpoint must be a directory on this host, as a path or a ray.tune.Checkpoint, "
            f"got {checkpoint!r:.200}"
        )
    given = os.fsdecode(checkpoint)
    if not given:
        # os.path.abspath would turn it into the working directory.
        raise MetricsError(
            f"checkpoint must be a directory on this host, got {given!r}; pass None if there is none"
        )
    path = os.path.abspath(given)
    if not os.path.isdir(path):
        what = "is a file" if os.path.exists(path) else "does not exist"
        raise MetricsError(f"checkpoint must be a directory on this host, but {path!r} {what}")
    return path
