"""The settings of a process that are not attributes of modules.

Those that training functions commonly change are restored. If another one has changed, the process is
replaced. What belongs to a thread or a context variable (grad mode, autocast, the default device, NumPy's
error state, decimal's context) is new in each trial's thread.
"""

from __future__ import annotations

import contextlib
import csv
import decimal
import functools
import gc
import itertools
import locale
import logging
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.managers  # for the reducers that its import registers
import os
import random
import re
import signal
import socket
import sys
import threading
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

# Settings that imports of libraries change.
_SET_BY_IMPORTS = ("warnings.filters", "logging", "sys.meta_path", "sys.path_hooks")


class Setting(NamedTuple):
    """One setting of the process.

    Attributes:
        name: its name in the reason for replacing a process.
        read: returns its value.
        write: restores its value; None if it is not restored.
        always: True if it is restored without a comparison, since `read` returns only the calling thread's.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], Any] | None = None
    always: bool = False


class Settings:
    """The values of the settings when this object was made."""

    def __init__(self) -> None:
        torch = sys.modules.get("torch")
        settings = [*_python_settings(), *(_torch_settings(torch) if torch is not None else ())]
        self._values = [(setting, setting.read()) for setting in settings]

    def set_by_imports(self) -> dict[str, Any]:
        """Return the settings that imports of libraries change."""
        return {
            setting.name: setting.read() for setting, _ in self._values if setting.name in _SET_BY_IMPORTS
        }

    def accept(self, before: dict[str, Any]) -> None:
        """Accept changes since ``before``, which `set_by_imports` returned before an import."""
        for number, (setting, known) in enumerate(self._values):
            if setting.name in before:
                self._values[number] = setting, _merged(known, before[setting.name], setting.read())

    def restore(self) -> list[str]:
        """Restore the settings that have changed; return those that could not be restored."""
        problems = []
        for setting, value in self._values:
            try:
                if not setting.always and setting.read() == value:
                    continue
                if setting.write is None:
                    problems.append(f"{setting.name} was changed")
                else:
                    setting.write(value)
            except Exception as error:  # any: the process is replaced then
                problems.append(f"{setting.name} was changed and cannot be restored: {error}")
        return problems


def _merged(known: Any, before: Any, after: Any) -> Any:
    """Return ``known`` with the changes between ``before`` and ``after``.

    >>> _merged({"a": 1}, {"a": 2}, {"a": 2, "b": 3}), _merged([1], [1, 2], [0, 1, 2])
    ({'a': 1, 'b': 3}, [0, 1])
    """
    if isinstance(known, dict):
        return known | {
            name: value for name, value in after.items() if name not in before or before[name] != value
        }
    return [each for each in after if each not in before] + known


def reseed() -> None:
    """Seed Python's and NumPy's generators from the system, as a new process does."""
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(None)


def _python_settings() -> Iterator[Setting]:
    yield Setting("the working directory", _working_directory, os.chdir)
    lists: list[Any] = [(sys, name) for name in ("path", "meta_path", "path_hooks", "argv")]
    for module, name in [*lists, (warnings, "filters")]:
        read = functools.partial(_read_list, module, name)
        write = functools.partial(_write_list, module, name, getattr(module, name))
        yield Setting(f"{module.__name__}.{name}", read, write)
    for name in ("stdin", "stdout", "stderr"):
        read, write = functools.partial(getattr, sys, name), functools.partial(setattr, sys, name)
        yield Setting(f"sys.{name}", read, write)
    yield Setting("logging", _logging, _write_logging)
    # Set by the first process that a trial starts, for example by a DataLoader.
    yield Setting(
        "the start method of multiprocessing",
        lambda: multiprocessing.get_start_method(allow_none=True),
        lambda value: multiprocessing.set_start_method(value, force=True),
    )
    only_read: dict[str, Callable[[], Any]] = {
        "the umask": lambda: _status("thread-self", "Umask"),  # os.umask() would set it, for all threads
        "tracemalloc": tracemalloc.is_tracing,
        "the switch interval": sys.getswitchinterval,
        "the flags of dlopen": sys.getdlopenflags,
        "the recursion limit": sys.getrecursionlimit,
        # Python 3.10.7 and later
        "the longest int in text": getattr(sys, "get_int_max_str_digits", lambda: None),
        "decimal's default context": lambda: repr(decimal.DefaultContext),
        "csv's settings": lambda: (csv.field_size_limit(), csv.list_dialects()),
        "NumPy's bit generator": _bit_generator,
        "multiprocessing": _multiprocessing,
        "threading.stack_size": threading.stack_size,
        "the garbage collector": lambda: (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
        "the locale": lambda: locale.setlocale(locale.LC_ALL),
        "the default socket timeout": socket.getdefaulttimeout,
        "the CPUs of the process": lambda: os.sched_getaffinity(0),
        "the priority": lambda: os.getpriority(os.PRIO_PROCESS, 0),
        "the I/O priority": psutil.Process().ionice,
        "the session of the process": lambda: (os.getsid(0), os.getpgrp()),
        "signal handlers": lambda: _status("self", "SigIgn", "SigCgt"),
    }
    for name in ("ITIMER_REAL", "ITIMER_PROF", "ITIMER_VIRTUAL"):
        only_read[name] = functools.partial(_is_running, getattr(signal, name))
    for name in ("limits", "oom_score_adj", "coredump_filter", "timerslack_ns"):
        only_read[f"/proc/self/{name}"] = Path(f"/proc/self/{name}").read_text
    with contextlib.suppress(ImportError):
        import threadpoolctl

        only_read["the number of BLAS threads"] = threadpoolctl.ThreadpoolController().info
    yield from (Setting(name, read) for name, read in only_read.items())


def _torch_settings(torch: Any) -> Iterator[Setting]:
    yield Setting("torch's random state", lambda: torch.get_rng_state().numpy().tobytes(), _rng_writer(torch))
    yield Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield Setting("the number of threads", torch.get_num_threads, torch.set_num_threads, always=True)
    yield Setting("the number of torch's inter-op threads", torch.get_num_interop_threads)
    yield Setting("anomaly detection", torch.is_anomaly_enabled)
    yield Setting("torch's sharing strategy", torch.multiprocessing.get_sharing_strategy)
    yield Setting("torch's profiler", torch.autograd._profiler_enabled)
    if torch.distributed.is_available():
        yield Setting("torch.distributed's debug level", torch.distributed.get_debug_level)
    yield Setting("TorchScript's fusion", lambda: _read_by_setting(torch))
    # Before the loop, since it sets several of the other precisions.
    read, write = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    yield Setting("the precision of float32 products", read, write)
    # All other settings in torch's C++ code: algorithms, precisions, which kernels are used.
    for name in filter(_TORCH_GETTERS.fullmatch, dir(torch._C)):
        read = getattr(torch._C, name)
        with contextlib.suppress(Exception):  # any: it may not exist in this build, or take arguments
            if isinstance(read(), bool | int | str | tuple | list | None) or name.endswith("_backend"):
                setter = name.replace("get_", "set_", 1)
                write = getattr(torch._C, setter, None) if setter != name else None
                if write is not None and isinstance(read(), tuple):
                    write = lambda value, setter=write: setter(*value)  # noqa: E731
                yield Setting(f"torch._C.{name}()", read, write)
    cuda = torch.cuda
    # Reading these would start CUDA.
    read = lambda: cuda.get_sync_debug_mode() if cuda.is_initialized() else 0  # noqa: E731
    yield Setting("CUDA's sync debug mode", read, cuda.set_sync_debug_mode)
    if hasattr(cuda, "get_per_process_memory_fraction"):  # torch 2.8 and later
        yield Setting("the usable part of a GPU's memory", *_memory_fraction(cuda))
    for backend, operation in itertools.product(
        ("generic", "cuda", "mkldnn"), ("all", "conv", "rnn", "matmul")
    ):
        with contextlib.suppress(Exception):  # any: not in this build
            read = functools.partial(torch._C._get_fp32_precision_getter, backend, operation)
            write = functools.partial(torch._C._set_fp32_precision_setter, backend, operation)
            read()
            yield Setting(f"the precision of {backend} {operation}", read, write)


# Excludes constants, settings of a thread, getters that would start CUDA, and what torch itself sets at the
# first attention on a GPU (sdp_priority).
_TORCH_GETTERS = re.compile(
    r"_get_(?!all_|accelerator|max_|operator_|upgraders_|thread|DTensor|caught_|torch_function|tracing"
    r"|sdp_priority)\w+"
    r"|_jit_(get_(?!all|custom|num)|can_fuse|texpr|llga)\w+|_is_(multithreading|view_replay|fwd_grad)_enabled"
    r"|_check_sparse_tensor_invariants|_cuda_get_cudnn_benchmark_limit"
)


def _read_by_setting(torch: Any) -> tuple[Any, ...]:
    """Return the settings that torch returns only from their setters."""
    profiles = torch._C._jit_set_profiling_executor(True)
    torch._C._jit_set_profiling_executor(profiles)
    strategy = torch._C._jit_set_fusion_strategy([])
    torch._C._jit_set_fusion_strategy(strategy)
    return profiles, strategy


def _memory_fraction(cuda: Any) -> tuple[Callable[[], float], Callable[[float], None]]:
    def read() -> float:
        devices = range(cuda.device_count() if cuda.is_initialized() else 0)
        return min(map(cuda.get_per_process_memory_fraction, devices), default=1.0)

    def write(fraction: float) -> None:
        for device in range(cuda.device_count()):
            if cuda.get_per_process_memory_fraction(device) != fraction:  # setting it starts CUDA there
                cuda.set_per_process_memory_fraction(fraction, device)

    return read, write


def _rng_writer(torch: Any) -> Callable[[bytes], Any]:
    return lambda state: torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _read_list(module: Any, name: str) -> list[Any]:
    return list(getattr(module, name))


def _write_list(module: Any, name: str, held: list[Any], value: list[Any]) -> None:
    # A trial may have set another list: `catch_warnings` does, and it stays if threads use it concurrently.
    held[:] = value
    setattr(module, name, held)


def _bit_generator() -> int:
    return id(sys.modules["numpy"].random.mtrand._rand._bit_generator) if "numpy" in sys.modules else 0


def _multiprocessing() -> tuple[Any, ...]:
    process = multiprocessing.current_process()
    server: Any = multiprocessing.forkserver._forkserver
    return process.name, bytes(process.authkey), list(server._preload_modules)


def _is_running(timer: int) -> bool:
    return signal.getitimer(timer)[0] > 0


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""  # the trial has removed its working directory


def _status(process: str, *names: str) -> list[str]:
    """Return fields of a process's /proc status, which include the signals that C code handles."""
    with open(f"/proc/{process}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return [fields[name] for name in names]


def _logging() -> dict[str, Any]:
    """Return the configuration of the logging module and of every logger."""
    loggers = logging.root.manager.loggerDict
    state: dict[str, Any] = {
        name: _logger_state(each) for name, each in list(loggers.items()) if isinstance(each, logging.Logger)
    }
    # Without loggers at their defaults: packages that are imported later create those.
    state = {name: each for name, each in state.items() if each != _untouched(each[0])}
    return {
        **state,
        "": _logger_state(logging.root),
        "/disable": logging.root.manager.disable,
        "/levels": (logging._levelToName.copy(), logging._nameToLevel.copy()),
    }


def _logger_state(logger: logging.Logger) -> tuple[Any, ...]:
    """Return a logger's class, attributes, handlers with what is set on them, and filters."""
    handlers = [(each, each.level, each.formatter, each.filters[:]) for each in logger.handlers]
    return type(logger), vars(logger) | _IN_PLACE, handlers, logger.filters[:]


# The attributes of a logger that tell its place among the others, and the lists that keep their identity.
_IN_PLACE = dict.fromkeys(("name", "parent", "manager", "_cache", "handlers", "filters"))
_UNTOUCHED = _logger_state(logging.Logger(""))


def _untouched(kind: type[logging.Logger]) -> tuple[Any, ...]:
    """Return the state of a new logger; one of a class that does not stay becomes a plain logger."""
    if kind is logging.Logger or getattr(sys.modules.get(kind.__module__), kind.__name__, None) is not kind:
        return _UNTOUCHED
    try:
        return _logger_state(kind(""))
    except Exception:  # any: its constructor may need more arguments
        return _UNTOUCHED


def _write_logging(value: dict[str, Any]) -> None:
    logging.disable(value["/disable"])
    names: list[Any] = [logging._levelToName, logging._nameToLevel]
    for held, levels in zip(names, value["/levels"], strict=True):
        held.clear()
        held.update(levels)
    for name, now in _logging().items():
        if not name.startswith("/") and (then := value.get(name) or _untouched(now[0])) != now:
            logger = logging.getLogger(name) if name else logging.root
            logger.__class__, attributes, handlers, logger.filters[:] = then
            for attribute in vars(logger).keys() - attributes.keys():
                delattr(logger, attribute)
            vars(logger).update({each: attributes[each] for each in attributes.keys() - _IN_PLACE.keys()})
            logger.setLevel(logger.level)  # which clears caches
            logger.handlers[:] = [each for each, *_ in handlers]
            for handler, level, formatter, filters in handlers:
                handler.level, handler.formatter, handler.filters[:] = level, formatter, filters
