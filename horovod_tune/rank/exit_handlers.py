"""Runs in each rank: the trial's `atexit` handlers, called when its training function has ended.

A rank's process outlives its trials, and Ray ends it with SIGKILL, so handlers registered with Python
would run after other trials or never. Trackers, writers and temporary directories rely on them.
"""

from __future__ import annotations

import atexit
import functools
import gc
import sys
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

from horovod_tune.rank.reset.imports import has_extension
from horovod_tune.session import session
from horovod_tune.session.session import Session

_real_register, _real_unregister = atexit.register, atexit.unregister
# Top-level packages that were loaded before the first trial. They outlive every trial, so their handlers
# belong to the process: Horovod's shutdown, the clean-up of multiprocessing.
_lasting: frozenset[str] = frozenset()


def install() -> None:
    """Make `atexit.register` add to the trial's handlers, from the first trial on."""
    global _lasting
    # Packages that a trial imports may stay, but what they register is the trial's.
    _lasting = frozenset(name.partition(".")[0] for name in sys.modules) - {"__main__"}
    # The first trial may import these, but they outlive it too: hvd.init() registers Horovod's shutdown, and
    # multiprocess, a fork of multiprocessing that `datasets` uses, stays.
    _lasting |= {*sys.stdlib_module_names, "horovod", "torch", "torch_xla", "ray", "multiprocess"}

    @functools.wraps(_real_register)  # type: ignore[arg-type]
    def register(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        live = session.current()
        if live is None or not callable(func) or _is_of_the_process(sys._getframe(1)):
            return _real_register(func, *args, **kwargs)
        live.exit_handlers.append((func, args, kwargs))
        return func

    @functools.wraps(_real_unregister)
    def unregister(func: Callable[..., Any], /) -> None:
        live = session.current()
        if live is not None:
            live.exit_handlers[:] = [each for each in live.exit_handlers if each[0] != func]
        _real_unregister(func)

    atexit.register, atexit.unregister = register, unregister


def _is_of_the_process(caller: FrameType) -> bool:
    """Return True if a library registers a handler that must run once, when the process ends."""
    package = caller.f_globals.get("__name__", "").partition(".")[0]
    # Libraries with extension modules register their own shutdown at import: pyarrow does for its S3 client.
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == package]
    return package in _lasting or (caller.f_code.co_name == "<module>" and has_extension(modules))


def run_handlers(of: Session) -> None:
    """Run the trial's handlers, the last one first; print an error in one, as Python does when it exits."""
    while of.exit_handlers:
        func, args, kwargs = of.exit_handlers.pop()
        try:
            func(*args, **kwargs)
        except BaseException as error:  # SystemExit too: as in Python, the others still run
            print(f"Exception ignored in atexit callback {func!r}:", file=sys.stderr)
            traceback.print_exception(error)


def end_process() -> None:
    """Run what Python runs when a process exits, in a process that is about to be killed.

    Ray's own handler is left out: it would close the connection of the actor that runs this.
    """
    for live in session.active():
        run_handlers(live)
    ray = sys.modules.get("ray")
    if ray is not None:
        _real_unregister(ray.shutdown)
    gc.collect()  # files that only modules and cycles refer to are written and closed
    atexit._run_exitfuncs()
