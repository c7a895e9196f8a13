"""What a trial may leave behind in its process, put back to how a new process has it.

Runs in each training actor, in the thread that ran nothing of the user's. `Baseline.restore` returns what it
could not put back; the process is then replaced.
"""

from __future__ import annotations

import gc
import linecache
import os
import random
import signal
import site
import sys
import sysconfig
import threading
import time
from types import ModuleType
from typing import Any

import psutil

THREADS_END_S = 0.5
"""How long a trial's own threads may take to end after it."""


class Baseline:
    """How this process was before its first trial."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        self._directory = os.getcwd()
        self._path = list(sys.path)
        self._modules = set(sys.modules)
        self._installed: set[str] = set()
        self._signals = {number: signal.getsignal(number) for number in signal.valid_signals()}
        self._threads = {thread.ident for thread in threading.enumerate()}
        self._children = set(_children())
        self._excepthook = sys.excepthook
        self._switch_interval = sys.getswitchinterval()
        self._torch = _TorchBaseline() if "torch" in sys.modules else None
        _collect_and_freeze()

    def restore(self) -> list[str]:
        """Put everything back; return what could not be."""
        problems = self._threads_left() + self._children_left()
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._directory)
        sys.path[:] = self._path
        sys.excepthook = self._excepthook
        sys.setswitchinterval(self._switch_interval)
        problems += [
            f"the handler of {signal.Signals(number).name} was changed"
            for number, handler in self._signals.items()
            if signal.getsignal(number) is not handler
        ]
        imported = self._forget_users_modules()
        random.seed()
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(None)
        if self._torch is not None:
            problems += self._torch.restore()
        if imported:
            _collect_and_freeze()
        else:
            gc.collect()
        if self._torch is not None:
            problems += self._torch.check_gpu_memory()
        return problems

    def _threads_left(self) -> list[str]:
        end = time.monotonic() + THREADS_END_S
        while True:
            mine = {threading.get_ident(), threading.main_thread().ident}
            left = [
                thread
                for thread in threading.enumerate()
                if thread.ident not in self._threads | mine and not _belongs_to_ray(thread)
            ]
            if not left or time.monotonic() > end:
                return [f"the thread {thread.name!r} still runs" for thread in left]
            left[0].join(timeout=0.02)

    def _children_left(self) -> list[str]:
        left = []
        for pid in _children():
            if pid in self._children:
                continue
            try:
                command = " ".join(psutil.Process(pid).cmdline())
                if "resource_tracker" in command:
                    continue  # Python's own, started once a process by multiprocessing; holds nothing
                left.append(f"the child process {pid} still runs: {command[:80]}")
            except psutil.NoSuchProcess:
                continue
        return left

    def _forget_users_modules(self) -> bool:
        """Make the next trial import the user's own modules anew, as they are on disk then.

        Installed packages stay, and so do modules that were there before the first trial. Returns whether
        the trial imported installed ones.
        """
        new = set(sys.modules) - self._modules - self._installed
        forgotten = {name for name in new if _is_users(sys.modules[name])}
        for name in forgotten:
            del sys.modules[name]
        if forgotten:
            linecache.checkcache()
        self._installed |= new - forgotten
        return bool(new - forgotten)


def _collect_and_freeze() -> None:
    # Modules live as long as the process: the collector need not look at them again after every trial.
    gc.collect()
    gc.freeze()


def _children() -> list[int]:
    """Return the pids of this process's children."""
    pids = []
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children") as file:
                pids += [int(pid) for pid in file.read().split()]
        except FileNotFoundError:
            if not os.path.exists("/proc/thread-self/children"):
                # A kernel without CONFIG_PROC_CHILDREN; psutil looks at every process of the host.
                return [child.pid for child in psutil.Process().children()]
    return pids


_INSTALLED = tuple(
    os.path.realpath(path) + os.sep
    for path in {
        *sysconfig.get_paths().values(),
        *site.getsitepackages(),
        os.path.dirname(os.__file__),
    }
    if path and os.path.isabs(path) and len(path) > 1 and os.path.basename(path) not in ("bin", "scripts")
)
_OURS = os.path.realpath(os.path.join(os.path.dirname(__file__), os.pardir)) + os.sep


def _is_users(module: ModuleType | None) -> bool:
    path = getattr(module, "__file__", None)
    # An extension module cannot be loaded twice in one process.
    if not path or not path.endswith(".py"):
        return False
    real = os.path.realpath(path)
    if real.startswith(_OURS):
        return False
    return "site-packages" not in real and "dist-packages" not in real and not real.startswith(_INSTALLED)


def _belongs_to_ray(thread: threading.Thread) -> bool:
    # Ray runs actor methods in threads that Python knows as dummies, and starts import and log threads.
    return isinstance(thread, threading._DummyThread) or thread.name.startswith(("ray_", "ray.", "AsyncIO"))


class _TorchBaseline:
    """torch's process-wide state. What belongs to a thread is new with each trial's thread."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._rng = torch.get_rng_state()
        self._dtype = torch.get_default_dtype()
        self._threads = torch.get_num_threads()
        self._interop = torch.get_num_interop_threads()
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
        self._precision = torch.get_float32_matmul_precision()
        self._anomaly = torch.is_anomaly_enabled()
        self._flags = {name: getattr(torch.backends.cudnn, name) for name in _CUDNN_FLAGS}
        self._hooks = {name: dict(getattr(torch.nn.modules.module, name)) for name in _global_hooks(torch)}
        self._flush_denormal = False

    def restore(self) -> list[str]:
        torch = self._torch
        torch.set_rng_state(self._rng)
        torch.set_default_dtype(self._dtype)
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        torch.use_deterministic_algorithms(self._deterministic, warn_only=self._warn_only)
        torch.set_float32_matmul_precision(self._precision)
        torch.autograd.set_detect_anomaly(self._anomaly)
        torch.set_flush_denormal(self._flush_denormal)
        for name, value in self._flags.items():
            if getattr(torch.backends.cudnn, name) != value:
                setattr(torch.backends.cudnn, name, value)
        for name, hooks in self._hooks.items():
            live: Any = getattr(torch.nn.modules.module, name)
            live.clear()
            live.update(hooks)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return ["torch.distributed is still initialised"]
        if torch.get_num_interop_threads() != self._interop:
            return ["the number of torch's inter-op threads was changed, which cannot be undone"]
        return []

    def check_gpu_memory(self) -> list[str]:
        cuda = self._torch.cuda
        if not (cuda.is_available() and cuda.is_initialized()):
            return []
        cuda.empty_cache()
        held = sum(cuda.memory_allocated(device) for device in range(cuda.device_count()))
        for device in range(cuda.device_count()):
            cuda.reset_peak_memory_stats(device)
        self._torch.cuda.manual_seed_all(self._torch.initial_seed())
        return [f"{held} bytes of GPU memory are still held"] if held else []


_CUDNN_FLAGS = ("enabled", "benchmark", "deterministic", "allow_tf32")


def _global_hooks(torch: ModuleType) -> list[str]:
    module = torch.nn.modules.module
    return [
        name
        for name in vars(module)
        if name.startswith("_global_") and name.endswith("hooks") and isinstance(getattr(module, name), dict)
    ]
