"""Checks private APIs of Ray and Horovod before they are touched: have they the shape that was written for?

A `Patch` says what it needs of the other library and what a user loses without it. Where the library has
changed, the patch leaves it alone and warns once in a process: things then work more slowly, not worse.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """One module, class, function or value of another library.

    Attributes:
        path: its module and, after a colon, its name there: ``"ray.tune.tune:run"``.
        parameters: a function's, in this order and no others; None compares nothing.
        accepts: parameters that a function has at least.
        uses: names that its code uses; of a class, that of its methods and of its base classes'. A method
            that also a base class has needs one, to be told from it where it is gone.
    """

    path: str
    parameters: tuple[str, ...] | None = None
    accepts: frozenset[str] = frozenset()
    uses: frozenset[str] = frozenset()

    def find(self) -> Any:
        """Return it. Raises ImportError or AttributeError where the library has none."""
        module, _, names = self.path.partition(":")
        found = importlib.import_module(module)
        for name in filter(None, names.split(".")):
            found = getattr(found, name)
        return found

    def differences(self) -> Iterator[str]:
        """Give what is not as expected, a sentence each."""
        name = self.path.replace(":", ".")
        try:
            found = self.find()
        except (ImportError, AttributeError) as error:
            yield f"there is no {name} ({error})"
            return
        # What we have wrapped ourselves is looked at as it was.
        found = inspect.unwrap(found) if callable(found) else found
        if self.parameters is not None or self.accepts:
            try:
                parameters = tuple(inspect.signature(found).parameters)
            except (TypeError, ValueError):
                yield f"{name} has no signature"
                return
            if self.parameters is not None and parameters != self.parameters:
                yield f"{name} takes ({', '.join(parameters)}), not ({', '.join(self.parameters)})"
            missing = self.accepts - set(parameters)
            if missing:
                yield f"{name} does not take {', '.join(sorted(missing))}"
        unused = self.uses - _names_in(found)
        if unused:
            yield f"{name} does not use {', '.join(sorted(unused))}"


def part(path: str, *parameters: str, uses: str = "") -> Part:
    """Return a `Part`; a function's parameters follow its path; ``uses`` has names, spaces between."""
    return Part(path, parameters or None, uses=frozenset(uses.split()))


# What each patch of this process came to, by its name.
_decided: dict[str, bool] = {}


@dataclass(frozen=True)
class Patch:
    """Something that we do with another library's private APIs.

    Attributes:
        name: of the patch, unique.
        without: what a user loses where it cannot be applied: a clause.
        parts: what it was written for.
    """

    name: str
    without: str
    parts: tuple[Part, ...]

    @property
    def fits(self) -> bool:
        """Whether the library has the shape. It is looked at once a process, and a change is logged once."""
        if self.name not in _decided:
            differences = [each for part in self.parts for each in part.differences()]
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
        """Whether to apply it now: the library has the shape, and nobody has asked in this process before."""
        return self.name not in _decided and self.fits


def _names_in(thing: Any) -> set[str]:
    """Return the names that the code of a function, or of a class with its bases, uses."""
    if inspect.isclass(thing):
        members = [member for base in thing.__mro__ for member in vars(base).values()]
    else:
        members = [thing]
    found: set[str] = set()
    for member in members:
        member = getattr(member, "fget", None) or getattr(member, "__func__", None) or member
        code = getattr(inspect.unwrap(member) if callable(member) else member, "__code__", None)
        if code is not None:
            found.update(_names_of_code(code))
    return found


def _names_of_code(code: CodeType) -> set[str]:
    names = {*code.co_names, *code.co_varnames, *code.co_freevars}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_of_code(constant)
    return names
