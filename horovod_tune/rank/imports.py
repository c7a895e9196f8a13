"""Runs in each rank: how long the training function's imports of installed packages take."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import site
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from types import ModuleType

# Imports of a package that take less are not worth a line on the screen; nor are modules that take less.
LEAST_S = 1.0
LEAST_MODULE_S = 0.1
# Of Python itself, and of packages; this package too, which may be a checkout.
_INSTALLED = tuple(
    os.path.realpath(path) + os.sep
    for path in {
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        os.path.dirname(os.__file__),
        os.path.join(os.path.dirname(__file__), os.pardir),
    }
    if path and os.path.isabs(path) and len(path) > 1
)


def is_installed(path: str) -> bool:
    """Return True if a source file belongs to Python or an installed package."""
    if path in ("built-in", "frozen") or "site-packages" in path or "dist-packages" in path:
        return True
    return os.path.realpath(path).startswith(_INSTALLED)


def top_level(name: str) -> str:
    return name.partition(".")[0]


class ImportTimes(importlib.abc.MetaPathFinder):
    """Measures the imports of this thread from now on, until `stop`.

    The time of a module includes that of what it imports itself.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._seconds: dict[str, float] = {}
        self._is_measuring = False
        sys.meta_path.insert(0, self)

    def stop(self) -> dict[str, float]:
        """Return the seconds of the modules of each package that took longer than a second.

        Modules, since ``import sklearn`` does not import ``sklearn.ensemble``.
        """
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        packages: dict[str, float] = {}
        for name, took in self._seconds.items():
            packages[top_level(name)] = packages.get(top_level(name), 0.0) + took
        return {
            name: round(took, 1)
            for name, took in self._seconds.items()
            if packages[top_level(name)] >= LEAST_S and took >= LEAST_MODULE_S
        }

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if self._is_measuring or threading.get_ident() != self._thread:
            return None
        others = [finder for finder in list(sys.meta_path) if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((each for each in found if each is not None), None)
        if spec is None or spec.loader is None or not is_installed(spec.origin or ""):
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            began, is_outermost = time.perf_counter(), not self._is_measuring
            self._is_measuring = True
            try:
                execute(module)
            finally:
                if is_outermost:
                    self._is_measuring = False
                    self._seconds[fullname] = time.perf_counter() - began

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
