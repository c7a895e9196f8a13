"""The driver's script in a rank: its functions and classes are names of the rank's ``__main__``.

Pickle looks for them there: in forks of a pool, or for `torch.save` of a model. A process that a rank spawns
cannot import the script, so that it gets them from here: a ``DataLoader`` with "forkserver", for example.
"""

from __future__ import annotations

import contextlib
import multiprocessing.spawn
import pickle
import sys
import types
from typing import Any

import cloudpickle


class _Names:
    """Unpickled in a process that a rank has spawned, before what that process is to run."""

    def __init__(self, pickled: dict[str, bytes]) -> None:
        self._pickled = pickled

    def __reduce__(self) -> Any:
        return _unpickle, (self._pickled,)


def _unpickle(pickled: dict[str, bytes]) -> None:
    for name, value in pickled.items():
        with contextlib.suppress(Exception):  # any: if the process needs it, it raises an error
            setattr(sys.modules["__main__"], name, pickle.loads(value))


def _names() -> _Names:
    """Return the functions and classes of the script; pickle would look for them in the new process."""
    pickled = {}
    for name, value in list(vars(sys.modules["__main__"]).items()):
        if isinstance(value, type | types.FunctionType) and value.__module__ == "__main__":
            with contextlib.suppress(Exception):  # any, of a user's __reduce__: as above
                pickled[name] = cloudpickle.dumps(value)
    return _Names(pickled)


def send_to_spawned() -> None:
    """Make processes that `multiprocessing` spawns from now on find the script's functions and classes."""
    original = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        # `multiprocessing.spawn.prepare` ignores keys that it does not know.
        return {**original(name), "horovod_tune_script": _names()}

    multiprocessing.spawn.get_preparation_data = get_preparation_data
