"""Prevents failures of displays, records and advice from ending a search. Runs in the driver.

In Tune, an exception in a callback ends the search: days of training would be lost to a line on the screen.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

_Class = TypeVar("_Class", bound=type)


@contextmanager
def best_effort(what: str) -> Iterator[None]:
    """Log an exception in the block as one warning that names `what`."""
    try:
        yield
    except Exception as error:  # any that a screen or a file can raise: the search is worth more
        logger.warning(
            "%s failed (%s: %s); the search continues without it", what, type(error).__name__, error
        )
        logger.debug("%s failed", what, exc_info=True)


def best_effort_callback(what: str, *deliberate: type[Exception]) -> Callable[[_Class], _Class]:
    """Return a decorator for classes of Tune callbacks: a hook that raises does not end the search.

    One warning per callback object names `what`. The object's later hooks are still called, to close a screen
    or print a summary. `deliberate` exceptions, which mean that the search cannot run, are re-raised.
    """

    def guarded(hook: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(hook)
        def call(self: Any, *args: Any, **keywords: Any) -> None:
            try:
                hook(self, *args, **keywords)
            except deliberate:
                raise
            except Exception:  # as in best_effort, once per object
                if not self.__dict__.get("_warned_of_failure"):
                    self._warned_of_failure = True
                    with best_effort(what):
                        raise

        return call

    def decorate(cls: _Class) -> _Class:
        for name, hook in list(vars(cls).items()):
            if name == "setup" or name.startswith("on_"):
                setattr(cls, name, guarded(hook))
        return cls

    return decorate
