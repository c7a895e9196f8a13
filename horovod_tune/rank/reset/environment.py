"""The environment variables of a process, and which of them its libraries read when they were imported.

A library that stays loaded keeps what it has read: matplotlib its backend, an OpenMP library its number of
threads. So the process is kept for trials that set such a variable to the same values. A trial that does not
fails before its first report, and is then tried again in a new process.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Callable
from typing import Any

from horovod_tune.rank.reset.imports import is_installed
from horovod_tune.rank.reset.watch import top_level
from horovod_tune.session import session

# Set by this package, to different values in each world; without the prefix HOROVOD_.
_RANK_VARIABLES = {f"{where}{what}" for where in ("", "LOCAL_", "CROSS_") for what in ("RANK", "SIZE")}
_RANK_VARIABLES |= {"HOSTNAME", "GLOO_RENDEZVOUS_ADDR", "GLOO_IFACE"}
# The modules that set variables for their callers.
_SETTERS = {__name__, "os", "_collections_abc", "collections.abc", "contextlib", "unittest.mock"}
_SETTERS |= {"dotenv.main", "accelerate.utils.environment"}
# What the libraries of torch and torch_xla read at their first use, which may be in a trial.
_READ_BY_TORCH = (
    *(b"ONEDNN_", b"DNNL_", b"MKL_", b"CUBLAS_", b"CUDNN_", b"CUDA_", b"NVIDIA_", b"PYTORCH_"),
    *(b"XLA_", b"PJRT_", b"TPU_", b"LIBTPU_"),
)


def horovod_settings() -> set[tuple[str, str]]:
    """Return the variables that Horovod and NCCL read, some of them only once per process."""
    variables = [each for each in os.environ.items() if each[0].startswith(("HOROVOD_", "NCCL_"))]
    return {each for each in variables if each[0].removeprefix("HOROVOD_") not in _RANK_VARIABLES}


class Environment:
    """The variables before the first trial; observes what is read and set later."""

    def __init__(self) -> None:
        self._environ: Any = os.environ
        self._known = self._values()
        # The shared libraries of a new worker, and those that trials have loaded since.
        self._libraries, self._loaded = _shared_libraries(), set[str]()
        # The names that the library which is being imported has read; None between imports.
        self._reads: set[bytes] | None = None
        # The libraries that stay, by the names that they have read in Python code.
        self._readers: dict[bytes, str] = {}
        # The values that this trial's function has set before its first report; None where it deleted one.
        self._set: dict[bytes, set[bytes | None]] = {}
        # The names that it has set later.
        self._set_later: set[bytes] = set()
        # The same as `_set`, of the trial whose import has read a variable.
        self._set_at_import: dict[bytes, set[bytes | None]] = {}
        self._is_used = False
        observed = _observe(dict(vars(os.environ)["_data"]), self._record_read, self._record_write)
        vars(os.environ)["_data"] = vars(os.environb)["_data"] = observed

    def begin_import(self) -> dict[bytes, Any]:
        """Record what is read until `end_import`, which takes what this returns."""
        self._reads = set()
        return self._values()

    def end_import(self, before: dict[bytes, Any]) -> set[bytes]:
        """Accept what the import has set; return the names that it has read."""
        reads, self._reads = self._reads or set(), None
        self._known |= {name: value for name, value in self._values().items() if before.get(name) != value}
        return reads

    def add_reads(self, library: str, names: set[bytes]) -> None:
        """Record that a library which stays in the process has read these variables."""
        self._readers = dict.fromkeys(names, library) | self._readers

    def check(self) -> None:
        """Raise RuntimeError if libraries of earlier trials have read other values than this trial has set.

        Call it before rank 0's first report: until then, the trial can be tried again.
        """
        for name in self._set_at_import.keys() | self._set.keys():
            if self._set.get(name) != self._set_at_import.get(name):
                self._refuse_if_read(name)

    def restore(self) -> list[str]:
        """Restore all variables; return those whose later values libraries may have kept."""
        os.environ = self._environ  # noqa: B003 - the original object
        self._loaded = _shared_libraries() - self._libraries
        problems = [
            f"{os.fsdecode(name)} was set after a report, which {by} keeps"
            for name in self._set_later
            if (by := self._reader(name))
        ]
        for name, values in self._set.items():
            by = self._reader(name)
            if by and self._set_at_import.setdefault(name, values) != values:  # on another rank than 0
                problems.append(f"{os.fsdecode(name)} was set otherwise than before, which {by} keeps")
        now = self._values()
        for name in {name for name, _ in now.items() ^ self._known.items()}:
            for_python, for_c = self._known.get(name, (None, None))
            if for_c is None:
                os.unsetenv(name)
            else:
                os.putenv(name, for_c)
            dict.pop(self._environ._data, name, None)
            if for_python is not None:
                dict.__setitem__(self._environ._data, name, for_python)
        self._set, self._set_later, self._is_used = {}, set(), True
        return problems

    def _values(self) -> dict[bytes, tuple[bytes | None, bytes | None]]:
        """Return the value of each variable for Python and for C code; they differ after `os.putenv`."""
        for_python, for_c = dict.copy(self._environ._data), _variables_of_c()
        return {name: (for_python.get(name), for_c.get(name)) for name in for_python | for_c}

    def _reader(self, name: bytes) -> str:
        """Return a library of this or, during a trial, an earlier trial that reads a variable; or nothing."""
        if name in self._readers or name.startswith(_READ_BY_TORCH):
            return self._readers.get(name, "torch")
        return next((os.path.basename(path) for path in sorted(self._loaded) if _contains(path, name)), "")

    def _refuse_if_read(self, name: bytes) -> None:
        if self._is_used and (by := self._reader(name)):
            raise RuntimeError(
                f"{os.fsdecode(name)} was set otherwise in the trial of this process in which {by} read it"
            )

    def _record_read(self, name: bytes) -> None:
        if self._reads is not None:
            self._reads.add(name)

    def _record_write(self, name: bytes, value: bytes | None) -> None:
        live = session.current()
        if self._reads is not None or not _is_called_by_user(live.own_package if live is not None else ""):
            return
        is_new = value not in self._set.get(name, ())
        if live is None or live.has_reported:
            self._set_later |= {name} if is_new else set()
            return
        self._set.setdefault(name, set()).add(value)
        if live.rank_info.rank == 0 and value not in self._set_at_import.get(name, ()):
            self._refuse_if_read(name)


def _observe(values: dict[bytes, bytes], on_read: Callable[..., None], on_write: Callable[..., None]) -> Any:
    """Return ``values`` as a dict that calls the functions with a name and its value, None if unset."""

    class Observed(dict[bytes, bytes]):
        def __getitem__(self, name: bytes) -> bytes:
            on_read(name)
            return super().__getitem__(name)

        def __setitem__(self, name: bytes, value: bytes) -> None:
            super().__setitem__(name, value)
            on_write(name, value)

        def __delitem__(self, name: bytes) -> None:
            super().__delitem__(name)
            on_write(name, None)

    return Observed(values)


def _is_called_by_user(own_package: str) -> bool:
    frame: Any = sys._getframe(2)
    while frame and frame.f_globals.get("__name__") in _SETTERS:
        frame = frame.f_back
    if frame is None:
        return False
    is_own = top_level(frame.f_globals.get("__name__", "")) == own_package
    return is_own or not is_installed(frame.f_code.co_filename)


def _variables_of_c() -> dict[bytes, bytes]:
    environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    found: dict[bytes, bytes] = {}
    for each in iter(environ):
        if each is None:
            break
        name, _, value = each.partition(b"=")
        found.setdefault(name, value)
    return found


def _shared_libraries() -> set[str]:
    with open("/proc/self/maps") as file:
        return {line.split(maxsplit=5)[5].rstrip("\n") for line in file if ".so" in line}


@functools.cache
def _contains(path: str, name: bytes) -> bool:
    """Return True if a file contains ``name`` as a C string."""
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(b"\0" + name + b"\0") >= 0
    except OSError:  # deleted since
        return False
