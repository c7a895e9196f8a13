"""Checks that private APIs of Ray and torch have the expected shape before they are used."""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

logger = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def difference(part: str) -> str:
    """Return how an API of another library differs from ``part``, which describes it; "" if it does not.

    ``part`` has the form ``module:name(parameters) uses names``, such as
    ``"ray.tune.logger:LoggerCallback.log_trial_start(self, trial) uses _trial_files"``. The parameters are
    all of the function's, in order. The names must occur in its source, or in the modules of a class's MRO.
    """
    signature, _, uses = part.partition(" uses ")
    path, _, parameters = signature.rstrip(")").partition("(")
    module, _, names = path.partition(":")
    name = path.replace(":", ".")
    try:
        found: Any = importlib.import_module(module)
        found = functools.reduce(getattr, filter(None, names.split(".")), found)
    except (ImportError, AttributeError) as error:
        return f"there is no {name} ({error})"
    # Check the original of a function that we have wrapped.
    found = inspect.unwrap(found) if callable(found) else found
    if parameters:
        try:
            takes = ", ".join(inspect.signature(found).parameters)
        except (TypeError, ValueError):
            return f"{name} has no signature"
        if takes != parameters:
            return f"{name} takes ({takes}), not ({parameters})"
    unused = [each for each in uses.split() if not re.search(rf"\b{each}\b", _source(found))]
    return f"{name} does not use {', '.join(unused)}" if unused else ""


def wrap(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace ``owner``'s method or function with the decorated one, whose first argument is the original."""
    original = getattr(owner, name)

    def replace(ours: Callable[..., Any]) -> None:
        @functools.wraps(original)
        def replacement(*args: Any, **keywords: Any) -> Any:
            return ours(original, *args, **keywords)

        setattr(owner, name, replacement)

    return replace


@functools.cache
def _source(found: Any) -> str:
    try:
        if not inspect.isclass(found):
            return inspect.getsource(found)
        # Take the whole modules: `inspect.getsource` of a class would parse its module to find the class.
        modules = {base.__module__ for base in found.__mro__} - {"builtins"}
        return "".join(inspect.getsource(sys.modules[each]) for each in modules)
    except (OSError, TypeError):  # compiled
        return ""


class Patch:
    """A use of another library's private APIs. If they have changed, it is left out, with one warning.

    ``without`` is what a user then loses, as a clause that no other patch has; ``parts`` are the APIs that
    the patch was written for, as in `difference`.
    """

    def __init__(self, without: str, *parts: str) -> None:
        self.without, self.parts = without, parts
        self._fits: bool | None = None
        self._applied = False

    # Until Python 3.12, `cached_property` has a lock, which imports would wait for.
    @property
    def fits(self) -> bool:
        """True if the library has the expected shape; the first check in a process logs any difference."""
        if self._fits is None:
            differences = list(filter(None, map(difference, self.parts)))
            self._fits = not differences
            if differences:
                library = re.split("[.:]", self.parts[0])[0]
                logger.warning(
                    "%s %s differs from what horovod_tune was checked against, so %s. (%s)",
                    library.capitalize(),
                    getattr(importlib.import_module(library), "__version__", "of unknown version"),
                    self.without,
                    "; ".join(differences),
                )
        return self._fits

    def once(self, apply: _Function) -> _Function:
        """Decorate a function that changes the library: only its first call in a process has an effect."""

        @functools.wraps(apply)
        def apply_once(*args: Any, **keywords: Any) -> Any:
            if self._applied:
                return None
            self._applied = True
            return apply(*args, **keywords) if self.fits else None

        return cast(_Function, apply_once)

    def otherwise(self, value: Any) -> Callable[[_Function], _Function]:
        """Return a decorator of functions that return ``value`` if the library has changed."""

        def decorate(function: _Function) -> _Function:
            @functools.wraps(function)
            def checked(*args: Any, **keywords: Any) -> Any:
                return function(*args, **keywords) if self.fits else value

            return cast(_Function, checked)

        return decorate
