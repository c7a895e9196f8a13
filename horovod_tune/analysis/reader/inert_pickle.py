"""Looks into a pickle without running it.

Tune keeps parts of an experiment's state as pickles. Unpickling a file that somebody else wrote runs whatever
they put there, and fails where one of their modules is missing. Here no class is imported and no function is
called: each object becomes an `Inert` that knows its class's name, its arguments and its state. Numbers of
NumPy become Python's.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict, deque
from typing import Any

import numpy as np

from horovod_tune.analysis.reader.pickle_check import refuse_harmful

_MAX_BYTES = 64 * 2**20
_MAX_CLASSES = 10_000
_PLAIN = {  # what can be made of data alone, and cannot be made to run anything
    ("collections", "OrderedDict"): OrderedDict,
    ("collections", "deque"): deque,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "complex"): complex,
}


class UnreadablePickle(ValueError):
    """Raised for bytes that are not a whole pickle."""


class Inert:
    """An object of a pickle that was looked at and not made: `name` is its class or function."""

    name = "?"
    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Inert:
        made = object.__new__(cls)
        made.args = args
        made.state = kwargs or None
        made.items = []
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Any) -> None:
        self.items.extend(items)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def __call__(self, *args: Any, **kwargs: Any) -> Inert:
        return type(self)(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<{self.short_name}>"

    @property
    def short_name(self) -> str:
        """The class's name without its module: `Float._LogUniform`."""
        return self.name.split(":", 1)[-1]

    def get(self, key: str, default: Any = None) -> Any:
        """An attribute as it was pickled."""
        if isinstance(self.state, dict):
            return self.state.get(key, default)
        if isinstance(self.state, tuple) and len(self.state) == 2:  # (dict, slots)
            for part in self.state:
                if isinstance(part, dict) and key in part:
                    return part[key]
        return default


class _NumpyDtype(Inert):
    """`numpy.dtype("f8", False, True)` and its state, where the byte order is."""


def _numpy_scalar(dtype: Any, data: Any = b"") -> Any:
    code = dtype.args[0] if isinstance(dtype, _NumpyDtype) and dtype.args else None
    # Only plain numbers: NumPy unpickles what an object dtype holds.
    if not isinstance(code, str) or not isinstance(data, bytes) or code[:1] not in "biuf":
        return Inert(dtype, data)
    order = dtype.state[1] if isinstance(dtype.state, tuple) and len(dtype.state) > 1 else "|"
    plain = np.dtype(code).newbyteorder(">" if order == ">" else "<")
    return np.frombuffer(data, dtype=plain, count=1)[0].item()


def _bytearray(data: Any = b"", *rest: Any) -> Any:
    return bytearray(data) if isinstance(data, bytes) else Inert(data)  # not of a number: so many bytes


class _Looker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO):
        super().__init__(file)
        self._classes: dict[str, type[Inert]] = {}

    def find_class(self, module: str, name: str) -> Any:
        plain = _PLAIN.get((module, name))
        if plain is not None:
            return plain
        if module == "numpy" and name == "dtype":
            return _NumpyDtype
        if module.startswith("numpy") and name == "scalar":
            return _numpy_scalar
        if (module, name) == ("builtins", "bytearray"):
            return _bytearray
        if name in ("_make_skeleton_class", "_make_skeleton_enum"):
            return self._skeleton_class
        return self._class_named(f"{module}:{name}")

    def _class_named(self, name: str) -> type[Inert]:
        if name not in self._classes:
            if len(self._classes) >= _MAX_CLASSES:
                raise UnreadablePickle(f"more than {_MAX_CLASSES:,} classes")
            self._classes[name] = type("Inert", (Inert,), {"name": name})
        return self._classes[name]

    def _skeleton_class(self, maker: Any, name: Any = "?", *rest: Any) -> type[Inert]:
        """A class that was pickled whole, as cloudpickle does with `__main__`'s: its objects need one."""
        return self._class_named(f"__main__:{name if isinstance(name, str) else '?'}")

    def persistent_load(self, pid: Any) -> Any:
        return Inert(pid)


def look(data: bytes) -> Any:
    """Return what a pickle holds, with an `Inert` in place of each object.

    Raises `UnreadablePickle` for anything that is not one whole pickle.
    """
    if len(data) > _MAX_BYTES:
        raise UnreadablePickle(f"pickle larger than {_MAX_BYTES} bytes: {len(data)}")
    try:
        refuse_harmful(data)
        return _Looker(io.BytesIO(data)).load()
    except UnreadablePickle:
        raise
    except RecursionError as error:
        raise UnreadablePickle("nested too deeply") from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise UnreadablePickle(f"{type(error).__name__}: {error}") from error
