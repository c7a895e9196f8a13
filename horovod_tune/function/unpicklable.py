"""Finds out why a training function cannot be pickled: which of its variables holds what.

Runs in the driver, after cloudpickle has failed, whose own error names a type and nothing of the user's.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any

# Deeper than anybody reads; data that contains itself ends here too.
_MAX_DEPTH = 8


def find_unpicklable(value: Any, dumps: Callable[[Any], object]) -> tuple[str, Any, Exception] | None:
    """Return where in ``value`` something cannot be pickled, that something, and its own error.

    ``dumps`` is what pickles. None where ``value`` itself can be pickled.

    >>> import cloudpickle, threading
    >>> where, what, _ = find_unpicklable({"model": [1, threading.Lock()]}, cloudpickle.dumps)
    >>> where, type(what).__name__
    ("['model'][1]", 'lock')
    """
    error = _failure(value, dumps)
    if error is None:
        return None
    path: list[str] = []
    for _ in range(_MAX_DEPTH):
        for label, part in parts_of(value):
            failed = _failure(part, dumps)
            if failed is not None:
                path.append(f", {label}" if path and label[0].isalpha() else label)
                value, error = part, failed
                break
        else:
            break
    return "".join(path), value, error


def _failure(value: Any, dumps: Callable[[Any], object]) -> Exception | None:
    try:
        dumps(value)
    except Exception as error:  # whatever a __reduce__ or __getstate__ of the user's raises
        return error
    return None


def parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Give what is pickled together with ``value``, each with words for where it stands."""
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
        case _:
            yield from ((f".{name}", each) for name, each in getattr(value, "__dict__", {}).items())


def _parts_of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield f"global variable {name!r}", function.__globals__[name]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield f"variable {name!r} of the function around it", cell.cell_contents
        except ValueError:
            continue  # not bound yet
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            yield f"default of the argument {name!r}", parameter.default
    yield from ((f"attribute {name!r}", each) for name, each in vars(function).items())


def _global_names(code: CodeType) -> list[str]:
    """Return the globals that a function's code reads, those of functions inside it included.

    >>> _global_names(compile("def f():\\n    return lambda: print(x.y)", "", "exec").co_consts[0])
    ['print', 'x']
    """
    names = [step.argval for step in dis.get_instructions(code) if step.opname.endswith("_GLOBAL")]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names += _global_names(constant)
    return list(dict.fromkeys(names))
