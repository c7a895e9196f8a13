"""Checks that private APIs of Ray and Horovod have the expected shape before they are used.

A `Patch` names what it needs of the other library and what a user loses without it. If the library has
changed, the patch is not applied and a warning is logged once per process: trials then run more slowly, not
worse.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """One module, class, function or value of another library.

    Attributes:
        path: its module and, after a colon, its name there: ``"ray.tune.tune:run"``.
        parameters: a function's, in this order and no others; None compares nothing.
        uses: names in the source of a function, or in the modules of a class and of its bases.
    """

    path: str
    parameters: tuple[str, ...] | None = None
    uses: tuple[str, ...] = ()

    def find(self) -> Any:
        """Return it. Raises ImportError or AttributeError if the library lacks it."""
        module, _, names = self.path.partition(":")
        return functools.reduce(getattr, filter(None, names.split(".")), importlib.import_module(module))

    def difference(self) -> str:
        """Return what is not as expected; "" if everything is."""
        name = self.path.replace(":", ".")
        try:
            found = self.find()
        except (ImportError, AttributeError) as error:
            return f"there is no {name} ({error})"
        # Of what we have wrapped ourselves, the original is checked.
        found = inspect.unwrap(found) if callable(found) else found
        if self.parameters is not None:
            try:
                parameters = tuple(inspect.signature(found).parameters)
            except (TypeError, ValueError):
                return f"{name} has no signature"
            if parameters != self.parameters:
                return f"{name} takes ({', '.join(parameters)}), not ({', '.join(self.parameters)})"
        unused = [each for each in self.uses if not re.search(rf"\b{each}\b", _source(found))]
        return f"{name} does not use {', '.join(unused)}" if unused else ""


def part(signature: str, uses: str = "") -> Part:
    """Return a `Part` from its path, with a function's parameters after it, and names separated by spaces.

    >>> part("json:dump(obj, fp)", uses="write").parameters
    ('obj', 'fp')
    """
    path, _, parameters = signature.rstrip(")").partition("(")
    return Part(path, tuple(parameters.split(", ")) if parameters else None, tuple(uses.split()))


def wrap(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
    """Replace a method or function of ``owner`` by the decorated one, which takes the original first."""
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
        # The whole modules: to find a class in its module, Python would parse that.
        modules = {base.__module__ for base in found.__mro__} - {"builtins"}
        return "".join(inspect.getsource(sys.modules[each]) for each in modules)
    except (OSError, TypeError):  # compiled
        return ""


# The result of each patch in this process, by its name.
_decided: dict[str, bool] = {}


@dataclass(frozen=True)
class Patch:
    """A use of another library's private APIs.

    Attributes:
        name: of the patch, unique.
        without: what a user loses if it cannot be applied, as a clause.
        parts: the APIs that it was written for.
    """

    name: str
    without: str
    parts: tuple[Part, ...]

    @property
    def fits(self) -> bool:
        """True if the library has the shape. It is checked once per process, and a change is logged once."""
        if self.name not in _decided:
            differences = [difference for part in self.parts if (difference := part.difference())]
            _decided[self.name] = not differences
            if differences:
                library = self.parts[0].path.partition(":")[0].partition(".")[0]
                logger.warning(
                    "%s %s differs from what horovod_tune was checked against, so %s. (%s)",
                    library.capitalize(),
                    getattr(importlib.import_module(library), "__version__", "of unknown version"),
                    self.without,
                    "; ".join(differences),
                )
        return _decided[self.name]

    @property
    def is_due(self) -> bool:
        """Return True if it must be applied now: the library has the shape, and it was not tried before."""
        return self.name not in _decided and self.fits
