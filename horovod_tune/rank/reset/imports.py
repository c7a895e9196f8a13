"""Removes modules that a training function imported, so that the next trial imports them again.

It removes the user's own modules, and installed packages without extension modules. These stay: packages
that a new worker has loaded in part (torch, NumPy, the standard library), packages with extension modules,
which a process can load only once, and packages that these refer to. They are watched once they are imported,
and what their import changes in other modules is accepted.
"""

from __future__ import annotations

import abc
import codecs
import functools
import importlib
import importlib.util
import linecache
import os
import re
import site
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from horovod_tune.rank.reset.settings import Settings
from horovod_tune.rank.reset.watch import Watch, read_attribute, top_level

if TYPE_CHECKING:
    from horovod_tune.rank.reset.environment import Environment

_INSTALLED = tuple(
    os.path.realpath(path) + os.sep
    for path in {
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
        *site.getsitepackages(),
        os.path.dirname(os.__file__),
        os.path.join(os.path.dirname(__file__), os.pardir, os.pardir),
    }
    if path and os.path.isabs(path) and len(path) > 1
)

# Functions whose effect on the process can be neither detected nor undone.
_LASTING_CALLS = (
    *((codecs, "register"), (codecs, "register_error"), (os, "register_at_fork"), (sys, "addaudithook")),
    (abc.ABCMeta, "register"),
)


class Imports:
    """The modules of this process before its first trial; tracks what is imported later."""

    def __init__(self, watch: Watch, settings: Settings, environment: Environment) -> None:
        self._watch, self._settings, self._environment = watch, settings, environment
        self._before = {name: module for name, module in sys.modules.items() if module is not None}
        self._packages = {top_level(name) for name in self._before}
        self._first = frozenset(self._packages)
        self._installed: dict[str, bool] = {}
        # Names of the modules that imports of libraries have loaded.
        self._library_modules: set[str] = set()
        # For each import in this trial: the library, the new modules, and the variables that were read.
        self._reads: list[tuple[str, set[str], set[bytes]]] = []
        self._thread = threading.local()
        self._calls: list[str] = []
        for owner, name in _LASTING_CALLS:
            setattr(owner, name, self._recording(owner, name))
        bootstrap: Any = importlib._bootstrap  # type: ignore[attr-defined]
        real = bootstrap._find_and_load

        def _call_with_frames_removed(name: str, import_: Callable[..., Any]) -> Any:
            if getattr(self._thread, "is_importing", False) or not self._is_library(top_level(name)):
                return real(name, import_)
            return self._import_library(real, name, import_)

        # Python leaves frames with these names out of tracebacks, as it does its own.
        for function in (_call_with_frames_removed, Imports._import_library):
            function.__code__ = function.__code__.replace(
                co_filename=real.__code__.co_filename, co_name="_call_with_frames_removed"
            )
        bootstrap._find_and_load = _call_with_frames_removed

    def _recording(self, owner: Any, name: str) -> Callable[..., Any]:
        """Wrap the function ``name``, to record calls outside the imports of libraries."""
        real = getattr(owner, name)

        @functools.wraps(real)
        def recorded(*given: Any, **named: Any) -> Any:
            is_importing = getattr(self._thread, "is_importing", False)
            # Registering a class as another's subclass lasts only if both stay.
            stay = owner is not abc.ABCMeta or all(
                top_level(each.__module__) in self._packages for each in given
            )
            if stay and not is_importing:
                self._calls.append(f"{owner.__name__}.{name}() was called")
            return real(*given, **named)

        return recorded

    def _import_library(self, real: Callable[..., Any], name: str, import_: Callable[..., Any]) -> Any:
        """Import ``name``, and accept what that changes in other modules."""
        is_tracked = top_level(name) not in sys.stdlib_module_names
        before = self._watch.differing() if is_tracked else {}
        settings = self._settings.set_by_imports() if is_tracked else {}
        variables = self._environment.begin_import()
        there = set(sys.modules)
        self._thread.is_importing = True
        try:
            return real(name, import_)
        finally:
            self._thread.is_importing = False
            new = set(sys.modules) - there
            self._library_modules |= new
            self._reads.append((top_level(name), new, self._environment.end_import(variables)))
            if is_tracked:
                self._watch.accept(before)
                self._settings.accept(settings)
            self._watch.add([sys.modules[each] for each in new if each in sys.modules])
            # Functions only of packages of which a new worker has loaded nothing.
            known = self._first | sys.stdlib_module_names
            names = [each for each in new if each in sys.modules and top_level(each) not in known]
            self._watch.add_functions([sys.modules[each] for each in names])

    def _is_library(self, package: str) -> bool:
        """Return True if a package is installed, or stays in this process between trials."""
        if package in self._packages:
            return True
        if package not in self._installed:
            try:
                spec = importlib.util.find_spec(package)
            except (ImportError, ValueError, AttributeError):
                spec = None
            places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
            self._installed[package] = any(is_installed(place) for place in places if place)
        return self._installed[package]

    def forget(self, own_package: str = "") -> tuple[bool, list[str]]:
        """Remove the modules that can be removed.

        Returns:
            True if some new modules stay, and the reasons why the process must be replaced.
        """
        calls, self._calls = self._calls, []
        reads, self._reads = self._reads, []
        for name, module in self._before.items():
            if sys.modules.get(name) is not module:
                sys.modules[name] = module
        new = {name: sys.modules[name] for name in sys.modules.keys() - self._before.keys()}
        if not new:
            return False, calls
        packages: dict[str, dict[str, Any]] = {}
        for name, module in new.items():
            packages.setdefault(top_level(name), {})[name] = module
        users = {
            top_level(name)
            for name, module in new.items()
            if top_level(name) not in self._packages
            and (top_level(name) == own_package or self._is_user_module(name, module))
        }
        stay = {name for name in packages if name in self._packages or has_extension(packages[name].values())}
        stay = self._with_references(stay, packages)
        forgotten = {name for package in packages.keys() - stay | users for name in packages[package]}
        for name in forgotten:
            del sys.modules[name]
        for library, loaded, variables in reads:
            if not loaded <= forgotten:
                self._environment.add_reads(library, variables)
        self._before |= {name: module for name, module in new.items() if name not in forgotten}
        self._packages |= stay
        self._watch.forget({top_level(name) for name in forgotten})
        if forgotten:
            linecache.checkcache()
        self._installed.clear()
        problems = [f"the package {name!r} cannot be imported twice in one process" for name in stay & users]
        return len(new) > len(forgotten), calls + problems

    def _is_user_module(self, name: str, module: Any) -> bool:
        path = getattr(module, "__file__", None) or "built-in"
        return name not in self._library_modules and not is_installed(path)

    def _with_references(self, stay: set[str], packages: dict[str, dict[str, Any]]) -> set[str]:
        """Return the packages that stay, those that they refer to, and those registered in other modules."""
        found, waiting = set(stay), [module for name in stay for module in packages[name].values()]
        referred = _packages_of(self._watch.registered)
        while True:
            for module in waiting:
                held = list(getattr(module, "__dict__", {}).values())
                referred |= _packages_of(each for each in held if not isinstance(each, str))
            added = (referred & packages.keys()) - found
            if not added:
                return found
            found |= added
            waiting, referred = [module for name in added for module in packages[name].values()], set()


def _packages_of(values: Iterable[Any]) -> set[str]:
    """Return the packages of ``values``: modules, functions, classes, objects, or names."""
    names = set()
    for value in values:
        # Not isinstance(), since a proxy's `__class__` may raise.
        if issubclass(type(value), str):
            match = re.match(r"\w+", value)
            names.add(match[0] if match else "")
            continue
        name = value.__name__ if issubclass(type(value), ModuleType) else None
        for each in (name, getattr(type(value), "__module__", None), read_attribute(value, "__module__")):
            if isinstance(each, str):
                names.add(top_level(each))
    return names


def has_extension(modules: Iterable[Any]) -> bool:
    files = [getattr(module, "__file__", None) or ".py" for module in modules]
    return not all(file.endswith((".py", ".pyc")) for file in files)


def is_installed(path: str) -> bool:
    if path in ("built-in", "frozen") or "site-packages" in path or "dist-packages" in path:
        return True
    return os.path.realpath(path).startswith(_INSTALLED)
