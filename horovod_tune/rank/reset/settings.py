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
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

# Attributes of modules that are restored: lists, and dicts of names.
_COLLECTIONS: tuple[tuple[Any, str], ...] = (
    *((sys, name) for name in ("path", "meta_path", "path_hooks", "argv")),
    *((warnings, "filters"), (logging, "_levelToName"), (logging, "_nameToLevel")),
)
# Settings that imports of libraries change.
_SET_BY_IMPORTS = (
    *("warnings.filters", "sys.meta_path", "sys.path_hooks", "loggers"),
    *("logging.disable", "logging._levelToName", "logging._nameToLevel"),
)

_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_PROF, signal.ITIMER_VIRTUAL)


class Setting(NamedTuple):
    """One setting of the process."""

    name: str  # in the reason for replacing a process
    read: Callable[[], Any]
    write: Callable[[Any], Any] | None = None  # None: it is not restored
    always: bool = False  # restored without a comparison: `read` returns only the calling thread's value


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

    >>> _merged({"a": 1}, {"a": 2}, {"a": 2, "b": 3}), _merged([1], [1, 2], [0, 1, 2]), _merged(0, 5, 5)
    ({'a': 1, 'b': 3}, [0, 1], 0)
    """
    if isinstance(known, int):
        return known if after == before else after
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
    for module, name in _COLLECTIONS:
        read = functools.partial(_read_collection, module, name)
        write = functools.partial(_write_collection, module, name, getattr(module, name))
        yield Setting(f"{module.__name__}.{name}", read, write)
    for name in ("stdin", "stdout", "stderr"):
        read, write = functools.partial(getattr, sys, name), functools.partial(setattr, sys, name)
        yield Setting(f"sys.{name}", read, write)
    yield Setting("logging.disable", lambda: logging.root.manager.disable, logging.disable)
    yield Setting("loggers", _loggers, _write_loggers)
    # Set by the first process that a trial starts, for example by a DataLoader.
    yield Setting(
        "the start method of multiprocessing",
        lambda: multiprocessing.get_start_method(allow_none=True),
        lambda value: multiprocessing.set_start_method(value, force=True),
    )
    only_read: dict[str, Callable[[], Any]] = {
        # os.umask() would set it, for all threads.
        "the umask": lambda: process_status("thread-self", "Umask"),
        "tracemalloc": tracemalloc.is_tracing,
        "the switch interval": sys.getswitchinterval,
        "the flags of dlopen": sys.getdlopenflags,
        "the recursion limit": sys.getrecursionlimit,
        # Python 3.10.7 and later
        "the longest int in text": getattr(sys, "get_int_max_str_digits", lambda: None),
        "decimal's default context": lambda: repr(decimal.DefaultContext),
        "csv's settings": lambda: (csv.field_size_limit(), csv.list_dialects()),
        "NumPy's bit generator": _bit_generator,
        "the name of the process": lambda: multiprocessing.current_process().name,
        "the key of the process": lambda: bytes(multiprocessing.current_process().authkey),
        "threading.stack_size": threading.stack_size,
        "the garbage collector": lambda: (gc.isenabled(), gc.get_threshold(), gc.get_debug()),
        "the locale": lambda: locale.setlocale(locale.LC_ALL),
        "the default socket timeout": socket.getdefaulttimeout,
        "the CPUs of the process": lambda: os.sched_getaffinity(0),
        "the priority": lambda: os.getpriority(os.PRIO_PROCESS, 0),
        "the I/O priority": psutil.Process().ionice,
        "the session of the process": lambda: (os.getsid(0), os.getpgrp()),
        "signal handlers": lambda: process_status("self", "SigIgn", "SigCgt"),
        "a timer": lambda: [signal.getitimer(each)[0] > 0 for each in _TIMERS],
    }
    for name in ("limits", "oom_score_adj", "coredump_filter", "timerslack_ns"):
        only_read[f"/proc/self/{name}"] = Path(f"/proc/self/{name}").read_text
    with contextlib.suppress(ImportError):
        import threadpoolctl

        only_read["the number of BLAS threads"] = threadpoolctl.ThreadpoolController().info
    yield from (Setting(name, read) for name, read in only_read.items())


def _torch_settings(torch: Any) -> Iterator[Setting]:
    yield Setting(
        "torch's random state",
        lambda: torch.get_rng_state().numpy().tobytes(),
        lambda state: torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
    )
    yield Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype)
    yield Setting("the number of threads", torch.get_num_threads, torch.set_num_threads, always=True)
    yield Setting("the number of torch's inter-op threads", torch.get_num_interop_threads)
    yield Setting("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly)
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


def _read_collection(module: Any, name: str) -> Any:
    value = getattr(module, name)
    return dict(value) if isinstance(value, dict) else list(value)


def _write_collection(module: Any, name: str, held: Any, value: Any) -> None:
    # A trial may have set another list: `catch_warnings` does, and it stays if threads use it concurrently.
    if isinstance(held, dict):
        held.clear()
        held.update(value)
    else:
        held[:] = value  # never empty, since other threads may import
    setattr(module, name, held)


def _bit_generator() -> int:
    return id(sys.modules["numpy"].random.mtrand._rand._bit_generator) if "numpy" in sys.modules else 0


def _working_directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""  # the trial has removed its working directory


def process_status(process: str, *names: str) -> list[str]:
    """Return fields of /proc/PROCESS/status, which include the signals that C code handles."""
    with open(f"/proc/{process}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return [fields[name] for name in names]


# The attributes of a logger that tell its place among the others, and a cache.
_OF_PLACE = {"name", "parent", "manager", "_cache"}


def _loggers() -> dict[Any, dict[str, Any]]:
    """Return what is set on every logger, and on its handlers."""
    others = list(logging.root.manager.loggerDict.values())
    loggers: list[Any] = [logging.root, *(each for each in others if isinstance(each, logging.Logger))]
    handlers = itertools.chain.from_iterable(each.handlers for each in loggers)
    # A handler with `__eq__`, such as a dataclass, may have no hash.
    hashable: list[Any] = [each for each in (*loggers, *handlers) if isinstance(each, Hashable)]
    return {each: _attributes(each) for each in hashable}


def _attributes(each: logging.Logger | logging.Handler) -> dict[str, Any]:
    if isinstance(each, logging.Handler):  # its other attributes, like its stream, are its own
        return {"level": each.level, "formatter": each.formatter, "filters": each.filters[:]}
    values = {**vars(each), "__class__": type(each)}
    return {
        name: value.copy() if isinstance(value, list) else value
        for name, value in values.items()
        if name not in _OF_PLACE
    }


_UNTOUCHED = _attributes(logging.Logger(""))


def _before_its_use(each: logging.Logger | logging.Handler, now: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of a new logger; one of a class that does not stay becomes a plain one."""
    kind = type(each)
    if isinstance(each, logging.Handler):
        return now
    if kind is logging.Logger or getattr(sys.modules.get(kind.__module__), kind.__name__, None) is not kind:
        return _UNTOUCHED
    try:
        return _attributes(kind(""))
    except Exception:  # any: its constructor may need more arguments
        return _UNTOUCHED


def _write_loggers(value: dict[Any, dict[str, Any]]) -> None:
    for each in _loggers() | value:  # also what a trial has removed
        now = _attributes(each)
        then = value.get(each) or _before_its_use(each, now)
        for name in now.keys() - then.keys():
            delattr(each, name)
        for name, old in then.items():
            if isinstance(old, list):
                getattr(each, name)[:] = old
            elif now.get(name) is not old:
                setattr(each, name, old)
    logging.root.setLevel(logging.root.level)  # which clears caches
