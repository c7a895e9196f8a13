"""The modules that a training function imports, and what it patches in modules that were there before."""

from __future__ import annotations

import inspect
import linecache
import operator
import os
import site
import sys
import sysconfig
from types import ModuleType
from typing import Any

_OURS = os.path.realpath(os.path.join(os.path.dirname(__file__), os.pardir)) + os.sep
_INSTALLED = tuple(
    os.path.realpath(path) + os.sep
    for path in {
        *sysconfig.get_paths().values(),
        *site.getsitepackages(),
        os.path.dirname(os.__file__),
    }
    if path and os.path.isabs(path) and len(path) > 1 and os.path.basename(path) not in ("bin", "scripts")
)
_PATCHED_OFTEN = (
    *("os", "time", "random", "math", "json", "pickle", "numpy", "numpy.random", "horovod.torch"),
    *("torch", "torch.nn", "torch.nn.functional", "torch.nn.init", "torch.optim", "torch.utils.data"),
)


class ImportedModules:
    """The modules of this process before its first trial, and the functions of those that people patch."""

    def __init__(self) -> None:
        self._before = set(sys.modules)
        self._installed: set[str] = set()
        self._originals = [(owner, dict(vars(owner))) for owner in _owners()]

    def forget_users(self) -> bool:
        """Make the next trial import the user's own modules anew, as they are on disk then.

        Installed packages stay, and so do modules that were there before the first trial. Returns whether
        the trial imported installed ones.
        """
        new = set(sys.modules) - self._before - self._installed
        forgotten = {name for name in new if _is_users(sys.modules[name])}
        self._unpatch()
        for name in forgotten:
            del sys.modules[name]
        if forgotten:
            linecache.checkcache()
        self._installed |= new - forgotten
        return bool(new - forgotten)

    def _unpatch(self) -> None:
        """Restore functions and classes that the user's code replaced, and drop what it added to classes.

        A package that patches others when it is imported stays as it is, and so do its patches.
        """
        for owner, originals in self._originals:
            now = vars(owner)
            if len(now) == len(originals) and all(map(operator.is_, now.values(), originals.values())):
                continue  # nearly always, and quicker than to look at 14,000 attributes one by one
            changed = [
                name for name, value in originals.items() if callable(value) and now.get(name) is not value
            ]
            for name in changed:
                if name not in now or is_of_user(now[name]):
                    setattr(owner, name, originals[name])
            if isinstance(owner, type) and len(now) > len(originals):
                for name in [each for each in now if each not in originals and is_of_user(now[each])]:
                    delattr(owner, name)


def _owners() -> list[Any]:
    """Return the modules and classes whose functions are watched."""
    modules = [sys.modules[name] for name in _PATCHED_OFTEN if name in sys.modules]
    classes = {
        each: None
        for module in modules
        if module.__name__.startswith("torch")
        for each in vars(module).values()
        if isinstance(each, type) and each.__module__.startswith("torch")
    }
    return [*modules, *classes]


def is_of_user(value: Any) -> bool:
    """Whether a function or class was defined by the user's code, or stands in for one (a mock)."""
    value = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    if not (inspect.isroutine(value) or inspect.isclass(value)):
        return callable(value)
    name = getattr(value, "__module__", None)
    if name is None:
        return False
    # What cloudpickle brings along says __main__, which is Ray's own program here.
    return name == "__main__" or name not in sys.modules or _is_users(sys.modules[name])


def _is_users(module: ModuleType | None) -> bool:
    path = getattr(module, "__file__", None)
    # An extension module cannot be loaded twice in one process.
    if not path or not path.endswith(".py"):
        return False
    if "site-packages" in path or "dist-packages" in path or path.startswith(_INSTALLED):
        return False
    real = os.path.realpath(path)
    return not real.startswith((_OURS, *_INSTALLED))
