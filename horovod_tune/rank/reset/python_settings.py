"""Python's process-wide settings that a training function may change: each can be read and written.

What belongs to a thread or a context variable (NumPy's error state, decimal's context, trace functions) is
new with each trial's thread and needs no reset.
"""

from __future__ import annotations

import asyncio
import builtins
import faulthandler
import gc
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from horovod_tune.rank.reset.imported_modules import is_of_user


@dataclass(frozen=True)
class Setting:
    """One setting of the process: ``read()`` returns its value, ``write(value)`` restores it."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any]


class SavedSettings:
    """The values that some settings had when this was made."""

    def __init__(self, settings: list[Setting]) -> None:
        self._values = [(setting, setting.read()) for setting in settings]

    def restore(self) -> list[str]:
        """Write the settings that have changed; return those that could not be restored."""
        problems = []
        for setting, value in self._values:
            if setting.read() == value:
                continue
            try:
                setting.write(value)
            except (OSError, ValueError, RuntimeError) as error:
                problems.append(f"{setting.name} was changed and cannot be restored: {error}")
        return problems


def attribute(owner: Any, name: str) -> Setting:
    """Return the setting that is an attribute of a module or of an object."""
    # Asked of modules only: some of torch's objects raise what they like for a name that they do not know.
    label = f"{owner.__name__ if isinstance(owner, ModuleType) else type(owner).__name__}.{name}"
    return Setting(label, lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def contents(name: str, holder: Any) -> Setting:
    """Return the setting that is what a list, dict or set of the process holds."""

    def write(value: Any) -> None:
        holder.clear()
        (holder.extend if isinstance(holder, list) else holder.update)(value)

    return Setting(name, holder.copy, write)


def python_settings() -> list[Setting]:
    """Return the settings of Python's own library. They are restored in this order."""
    return [
        Setting("os.environ", lambda: dict(os.environ), _write_environment),
        Setting("the working directory", _working_directory, os.chdir),
        Setting("the umask", _umask, os.umask),
        contents("sys.path", sys.path),
        Setting("sys.meta_path", sys.meta_path.copy, _write_finders),
        contents("sys.path_hooks", sys.path_hooks),
        contents("sys.argv", sys.argv),
        *(attribute(sys, name) for name in ("stdin", "stdout", "stderr", "excepthook", "displayhook")),
        *(attribute(sys, name) for name in ("unraisablehook", "dont_write_bytecode")),
        attribute(threading, "excepthook"),
        Setting("the trace function of threads", lambda: threading._trace_hook, threading.settrace),  # type: ignore[attr-defined]
        Setting("the profile function of threads", lambda: threading._profile_hook, threading.setprofile),  # type: ignore[attr-defined]
        Setting("the switch interval", sys.getswitchinterval, sys.setswitchinterval),
        Setting("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
        Setting("threading.stack_size", threading.stack_size, threading.stack_size),
        Setting("gc.isenabled", gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
        Setting("gc.get_threshold", gc.get_threshold, lambda value: gc.set_threshold(*value)),
        Setting("gc.get_debug", gc.get_debug, gc.set_debug),
        contents("gc.callbacks", gc.callbacks),
        Setting("faulthandler", faulthandler.is_enabled, _write_faulthandler),
        contents("warnings.filters", warnings.filters),
        attribute(warnings, "showwarning"),
        Setting("logging", _logging, _write_logging),
        Setting("the locale", lambda: locale.setlocale(locale.LC_ALL), _write_locale),
        Setting("the time zone", lambda: time.tzname, lambda _: time.tzset()),
        Setting("the default socket timeout", socket.getdefaulttimeout, socket.setdefaulttimeout),
        attribute(tempfile, "tempdir"),
        Setting("the start method of multiprocessing", _start_method, _write_start_method),
        attribute(asyncio.events, "_event_loop_policy"),
        Setting("the alarm timer", lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0, _write_no_alarm),
        Setting("the CPUs of the process", lambda: os.sched_getaffinity(0), _write_affinity),
        *(_limit(name) for name in ("RLIMIT_NOFILE", "RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_STACK")),
        Setting("the priority", lambda: os.getpriority(os.PRIO_PROCESS, 0), _write_priority),
        Setting("signal handlers", _signal_masks, _refuse),
        Setting("built-in functions", lambda: dict(vars(builtins)), _write_builtins),
    ]


def reseed() -> None:
    """Give Python's and NumPy's generators new seeds from the system, as a new process does."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(None)


def _write_environment(value: dict[str, str]) -> None:
    for name in set(os.environ) - set(value):
        del os.environ[name]
    os.environ.update(value)


def _write_finders(value: list[Any]) -> None:
    # Packages that a trial imports may install finders of their own, which they go on needing.
    sys.meta_path[:] = [each for each in sys.meta_path if each in value or not is_of_user(_class_of(each))]
    sys.meta_path += [each for each in value if each not in sys.meta_path]


def _class_of(finder: Any) -> type:
    return finder if isinstance(finder, type) else type(finder)


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""  # the trial has removed the directory that it was in


def _umask() -> int:
    with open("/proc/thread-self/status") as file:
        # os.umask() can be asked only by setting it, which is a race with other threads.
        return next(int(line.split()[1], 8) for line in file if line.startswith("Umask:"))


def _signal_masks() -> tuple[str, ...]:
    """Return which signals this process ignores and catches, also where C code has asked for it."""
    with open("/proc/self/status") as file:
        return tuple(line for line in file if line.startswith(("SigIgn:", "SigCgt:")))


def _refuse(_: object) -> None:
    raise RuntimeError("only the main thread can")


def _write_faulthandler(enabled: bool) -> None:
    if enabled:
        faulthandler.enable(sys.__stderr__ or 2)
    else:
        faulthandler.disable()


def _write_locale(value: str) -> None:
    locale.setlocale(locale.LC_ALL, value)


def _start_method() -> str | None:
    return multiprocessing.get_start_method(allow_none=True)


def _write_start_method(value: str | None) -> None:
    multiprocessing.set_start_method(value, force=True)


def _write_no_alarm(_: object) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)


def _write_affinity(cpus: set[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), cpus)
        except ProcessLookupError:
            continue


def _write_priority(value: int) -> None:
    os.setpriority(os.PRIO_PROCESS, 0, value)


def _limit(name: str) -> Setting:
    number = getattr(resource, name)
    return Setting(name, lambda: resource.getrlimit(number), lambda value: resource.setrlimit(number, value))


def _write_builtins(value: dict[str, Any]) -> None:
    for name in set(vars(builtins)) - set(value):
        delattr(builtins, name)
    vars(builtins).update(value)


def _logging() -> dict[str, Any]:
    """Return the configuration of every logger that there is."""
    loggers = logging.root.manager.loggerDict
    state: dict[str, Any] = {
        name: _logger_state(each) for name, each in list(loggers.items()) if isinstance(each, logging.Logger)
    }
    # Loggers that came with a package after the baseline are at their defaults: only changes count.
    state = {name: each for name, each in state.items() if each != _UNTOUCHED}
    return {
        **state,
        "": _logger_state(logging.root),
        "/disable": logging.root.manager.disable,
        "/class": logging.getLoggerClass(),
        "/captured": logging._warnings_showwarning,  # type: ignore[attr-defined]
    }


def _logger_state(logger: logging.Logger) -> tuple[Any, ...]:
    return logger.level, logger.propagate, logger.disabled, tuple(logger.handlers), tuple(logger.filters)


_UNTOUCHED = (logging.NOTSET, True, False, (), ())


def _write_logging(value: dict[str, Any]) -> None:
    logging.captureWarnings(value["/captured"] is not None)
    logging.disable(value["/disable"])
    logging.setLoggerClass(value["/class"])
    for name, now in _logging().items():
        if name.startswith("/") or (name not in value and name.partition(".")[0] in sys.modules):
            continue  # a package that the trial imported has set up its own logger
        then = value.get(name, _UNTOUCHED)
        if then != now:
            logger = logging.getLogger(name) if name else logging.root
            level, logger.propagate, logger.disabled, handlers, filters = then
            logger.setLevel(level)
            logger.handlers[:], logger.filters[:] = handlers, filters
