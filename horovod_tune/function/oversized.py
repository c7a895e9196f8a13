"""Names what makes a training function too large to be sent to its ranks.

Runs in the driver, only once a function is known to be too large: each part is pickled again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from horovod_tune.errors import SerializationError
from horovod_tune.function.training_function import function_name
from horovod_tune.function.unpicklable import parts_of

MB = 1_000_000
# Deeper than functions that call functions are read.
_MAX_DEPTH = 8


def oversized_error(
    function: Any, size: int, max_bytes: float, dumps: Callable[[Any], bytes]
) -> SerializationError:
    """Return the error for a function of ``size`` bytes, of which ``dumps`` made more than ``max_bytes``."""
    name = function_name(function)
    found = find_largest(function, size, dumps)
    cause = ""
    if found is not None:
        where, what, part_size = found
        kind = f"{type(what).__module__}.{type(what).__qualname__}"
        cause = f", {part_size / MB:.0f} MB of it its {where} of type {kind}"
    return SerializationError(
        f"{name} cannot be sent to its ranks: with all that it refers to it must be at most "
        f"{max_bytes / MB:.1f} MB, which is what Ray takes (FUNCTION_SIZE_ERROR_THRESHOLD), got "
        f"{size / MB:.1f} MB{cause}. Give it large objects with horovod_tune.with_parameters, or load them "
        "inside the function."
    )


def find_largest(function: Any, size: int, dumps: Callable[[Any], bytes]) -> tuple[str, Any, int] | None:
    """Return where in ``function`` at least half of its bytes are, what is there, and its own size.

    None where no single variable has as much.

    >>> import cloudpickle
    >>> data = b"0" * 1000
    >>> function = lambda config: len(data)
    >>> size = len(cloudpickle.dumps(function))
    >>> where, _, _ = find_largest(partial(function, 3), size, cloudpickle.dumps)
    >>> where
    "function below functools.partial, global variable 'data'"
    """
    path: list[str] = []
    value, of_value = function, size
    for _ in range(_MAX_DEPTH):
        # Of a list or a model the variable that holds it says enough.
        if path and not isinstance(value, FunctionType | MethodType | partial):
            break
        sized = ((label, part, _size(part, dumps)) for label, part in parts_of(value))
        largest = next((each for each in sized if each[2] >= size / 2), None)
        if largest is None:
            break
        label, value, of_value = largest
        path.append(label)
    return (", ".join(path), value, of_value) if path else None


def _size(value: Any, dumps: Callable[[Any], bytes]) -> int:
    try:
        return len(dumps(value))
    except Exception:  # of something that is not pickled as such with the function; the others are looked at
        return 0
