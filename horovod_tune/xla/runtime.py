"""The interface to the library that starts a host's ranks. Used in the ranks' parent and in each rank."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from horovod_tune.messages import FailureKind

Serve = Callable[..., None]


@dataclass(frozen=True)
class LaunchPlan:
    """The environment of a host's ranks.

    ``environment`` is common to them; ``of_each`` holds the variables of each process, in the order of
    processes on the host (empty: torch_xla determines them).
    """

    environment: dict[str, str] = field(default_factory=dict)
    of_each: tuple[dict[str, str], ...] = ()


@dataclass(frozen=True)
class Ordinals:
    """A rank's number among all ranks and among those on its host, as its runtime reports them."""

    ordinal: int
    world_size: int
    local_ordinal: int
    local_size: int


class Runtime(Protocol):
    """Starts the ranks of a host and handles their device: `TorchXla`, or a test's fake."""

    def load(self) -> None:
        """Import what ranks need. Runs in the parent, before it forks, and must not touch a device."""

    def launch(
        self, serve: Serve, plan: LaunchPlan, arguments: tuple[Any, ...], abort: Callable[[], NoReturn]
    ) -> None:
        """Run ``serve(ordinal, *arguments)`` in every rank; return or raise when they have ended.

        A process that fails before ``serve`` must call ``abort()`` in its exception handler: the others may
        wait for it.
        """

    def open_cache(self) -> None:
        """Set where compiled graphs are kept. Runs in each rank, before it computes anything."""

    def ordinals(self) -> Ordinals:
        """Return this rank's ordinals. Runs in the thread in which ``serve`` was called."""

    def enter_thread(self) -> Callable[[], None]:
        """Return a function that lets another thread of this process act as this rank."""

    def describe_failure(self, error: BaseException) -> tuple[FailureKind, str]:
        """Return the kind of the training function's error, and advice to add to its traceback.

        It is ``DISCONNECTED`` if another rank's end caused the error: the traceback then shows no cause.
        """

    def operations(self) -> int:
        """Return a number that changes when this process does anything with its device."""

    def begin_baseline(self) -> None:
        """Record the device's state before the first trial."""

    def restore(self) -> list[str]:
        """Restore the device's state, after everything else; return what could not be restored."""


def load_runtime(path: str) -> Runtime:
    """Return a new runtime; ``path`` names its class as ``module:Class``."""
    module, _, name = path.partition(":")
    runtime: Runtime = getattr(importlib.import_module(module), name)()
    return runtime
