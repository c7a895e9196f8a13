"""Runs in each rank: the trial's `atexit` handlers, called when its training function has ended.

A rank's process outlives its trials, and Ray ends it with SIGKILL, so handlers given to Python would run
after other trials or never: trackers, writers and temporary directories rely on them.
"""

from __future__ import annotations

import atexit
import functools
import gc
import sys
import traceback
from collections.abc import Callable
from typing import Any

from horovod_tune.session import session
from horovod_tune.session.session import Session

_real_register, _real_unregister = atexit.register, atexit.unregister
# Top-level packages that were there before the first trial: they outlive every trial, and so do what they
# register (Horovod's shutdown, the clean-up of multiprocessing).
_lasting: frozenset[str] = frozenset()


def install() -> None:
    """Make `atexit.register` add to the calling trial; once per process, before its first trial."""
    global _lasting
    if atexit.register is not _real_register:
        return
    _lasting = frozenset(name.partition(".")[0] for name in sys.modules) - {"__main__"}
    # What a first trial imports of these registers the end of the process too: hvd.init() its own shutdown.
    _lasting |= {*sys.stdlib_module_names, "horovod", "torch", "torch_xla", "ray"}

    @functools.wraps(_real_register)  # type: ignore[arg-type]
    def register(func: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        live = session.current()
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if live is None or not callable(func) or caller.partition(".")[0] in _lasting:
            return _real_register(func, *args, **kwargs)
        live.exit_handlers.append(functools.partial(func, *args, **kwargs))
        return func

    @functools.wraps(_real_unregister)
    def unregister(func: Callable[..., Any], /) -> None:
        live = session.current()
        if live is not None:
            live.exit_handlers[:] = [each for each in live.exit_handlers if each.func != func]
        _real_unregister(func)

    atexit.register, atexit.unregister = register, unregister


def run_handlers(of: Session) -> None:
    """Run the trial's handlers, the last one first; an error of one is printed, as at Python's exit."""
    while of.exit_handlers:
        handler = of.exit_handlers.pop()
        try:
            handler()
        except BaseException as error:  # SystemExit too: as in Python, the others still run
            print(f"Exception ignored in atexit callback {handler.func!r}:", file=sys.stderr)
            traceback.print_exception(error)


def end_process() -> None:
    """Run what Python runs when a process exits, in a process that is about to be killed.

    Ray's own handler is left out: it would take the connection from the actor that this runs in.
    """
    for live in session.active():
        run_handlers(live)
    ray = sys.modules.get("ray")
    if ray is not None:
        _real_unregister(ray.shutdown)
    gc.collect()  # files that only modules and cycles refer to are written and closed
    atexit._run_exitfuncs()
