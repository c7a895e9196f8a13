"""Runs in the driver: finds the variable of a training function that cannot be pickled, or is too large.

cloudpickle's own error names a type but no variable. Each part is pickled again, so this is done only then.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

from horovod_tune.errors import SerializationError

Dumps = Callable[[Any], bytes]
Finding = TypeVar("Finding")
# A deeper path would not be readable. The limit also ends the descent into data that contains itself.
_MAX_DEPTH = 8


def unpicklable(
    what: str, value: Any, dumps: Dumps, cure: str = "Make it inside the function.", of: str = "its "
) -> SerializationError | None:
    """Return an error that names the part of ``value`` that cannot be pickled; None if all of it can be.

    ``what`` is the error's name for ``value``; ``of`` precedes the part's location; ``dumps`` pickles.

    >>> import cloudpickle, threading
    >>> print(unpicklable("config", {"model": [1, threading.Lock()]}, cloudpickle.dumps))
    config cannot be sent to the ranks, because of its ['model'][1], which is of type _thread.lock: cannot \
pickle '_thread.lock' object. Make it inside the function.
    """

    def failure(part: Any) -> Exception | None:
        try:
            dumps(part)
        except Exception as error:  # whatever a user's __reduce__ or __getstate__ raises
            return error
        return None

    error = failure(value)
    if error is None:
        return None
    where, part, cause = _descend(value, error, failure)
    place = f", because of {of}{where}, which" if where else ": it"
    return SerializationError(
        f"{what} cannot be sent to the ranks{place} is of type {type_name(part)}: {cause}. {cure}"
    )


def find_largest(function: Any, size: int, dumps: Dumps) -> tuple[str, Any, int] | None:
    """Return the location, value and size in bytes of a variable that is at least half of ``function``.

    None if no single variable is that large. It does not search inside a list or a model.

    >>> import cloudpickle
    >>> data = b"0" * 1000
    >>> function = lambda config: len(data)
    >>> size = len(cloudpickle.dumps(function))
    >>> where, _, _ = find_largest(partial(function, 3), size, cloudpickle.dumps)
    >>> where
    "function below functools.partial, global variable 'data'"
    """

    def large(part: Any) -> int | None:
        try:
            largest = len(dumps(part))
        except Exception:  # any: pickled by itself, a part may fail
            return None
        return largest if largest >= size / 2 else None

    largest = _descend(function, size, large, into=FunctionType | MethodType | partial)
    return largest if largest[0] else None


def _descend(
    value: Any, finding: Finding, find: Callable[[Any], Finding | None], into: Any = object
) -> tuple[str, Any, Finding]:
    """Descend, level by level, into the first part of ``value`` for which ``find`` returns something.

    Returns:
        the location of the innermost part reached, the part, and what was found.
    """
    path = ""
    for _ in range(_MAX_DEPTH):
        if getattr(finding, "culprit", None) is value:
            break
        parts = parts_of(value) if not path or isinstance(value, into) else ()
        for label, part in parts:
            if (inner := find(part)) is not None:
                path += f", {label}" if path and label[0].isalpha() else label
                value, finding = part, inner
                break
        else:
            break
    return path, value, finding


def type_name(value: Any) -> str:
    """Return the full name of an object's class.

    >>> type_name(partial(print))
    'functools.partial'
    """
    return f"{type(value).__module__}.{type(value).__qualname__}"


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects pickled together with ``value``, each with a description of its location."""
    match value:
        case FunctionType():
            yield from _parts_of_function(value)
        case MethodType():
            yield "bound object", value.__self__
        case partial():
            yield "function below functools.partial", value.func
            yield from ((f"argument {i} of functools.partial", each) for i, each in enumerate(value.args))
            yield from ((f"argument {name!r} of functools.partial", v) for name, v in value.keywords.items())
        case Mapping():
            yield from ((f"[{key!r}]", each) for key, each in value.items())
        case list() | tuple():
            yield from ((f"[{i}]", each) for i, each in enumerate(value))
        case set() | frozenset():
            yield from (("(an element)", each) for each in value)
        case type():
            yield from ((f".{name}", each) for name, each in vars(value).items() if name != "__dict__")
        case _ if not isinstance(value, ModuleType):
            yield from ((f".{name}", each) for name, each in getattr(value, "__dict__", {}).items())


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield f"global variable {name!r}", function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"variable {name!r} of the enclosing function", cell.cell_contents
        except ValueError:
            continue  # not bound yet
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            yield f"default of the argument {name!r}", parameter.default
    yield from ((f"attribute {name!r}", each) for name, each in vars(function).items())


def _global_names(code: CodeType) -> list[str]:
    """Return the globals that a function's code reads, including those of functions inside it.

    >>> _global_names(compile("def f():\\n    return lambda: print(x.y)", "", "exec").co_consts[0])
    ['print', 'x']
    """
    names = [step.argval for step in dis.get_instructions(code) if step.opname.endswith("_GLOBAL")]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names += _global_names(constant)
    return list(dict.fromkeys(names))
