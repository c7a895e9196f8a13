"""Restores a rank's process after a trial, so that the next trial finds the state of a new process.

Runs in each rank, in a thread that runs no user code. `Baseline.restore` returns what it could not restore;
the process is then replaced. `imports` restores the loaded modules, `watch` the contents of those that stay,
`environment` the environment variables, `settings` everything else.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import sys
import threading
import time
import typing
import weakref
from multiprocessing import resource_tracker
from typing import Any

import psutil

from horovod_tune.rank import exit_handlers
from horovod_tune.rank.allocator import release_freed_memory
from horovod_tune.rank.reset.environment import Environment, horovod_settings
from horovod_tune.rank.reset.imports import Imports
from horovod_tune.rank.reset.settings import Settings, process_status, reseed
from horovod_tune.rank.reset.watch import Watch
from horovod_tune.rank.streams import unusable_streams
from horovod_tune.ray_compat.tune_session import forget_classes

# How long threads and child processes may take to end after the trial that started them.
EXIT_TIMEOUT_S = 0.5
# How many more files than before the first trial may be open.
MAX_FILES_LEFT = 256
# How much more anonymous memory than before the first trial a process may use. Libraries (oneDNN, BLAS, the
# modules of scikit-learn, SciPy and pandas) kept 170 MB at most.
MAX_MEMORY_LEFT_MB = 640
# The same if the process uses a GPU: CUDA keeps some memory; how much was not measured.
MAX_MEMORY_LEFT_CUDA_MB = 2048
# The fraction of a GPU's memory that may stay allocated: torch 2.11 kept DistributedDataParallel's gradient
# buckets of short trials.
MAX_GPU_MEMORY_LEFT = 0.01


class Baseline:
    """The state of this process before its first trial."""

    def __init__(self) -> None:
        exit_handlers.install()
        # A rank has no screen; without this, matplotlib looks for one at its first plot.
        os.environ.setdefault("MPLBACKEND", "agg")
        self.environment = Environment()
        self._settings = Settings()
        # The many new objects would trigger garbage collections, which find nothing.
        was_on = gc.isenabled()
        gc.disable()
        self._watch = Watch()
        self._imports = Imports(self._watch, self._settings, self.environment)
        self._watch.add(list(sys.modules.values()))
        if was_on:
            gc.enable()
        self._horovod = horovod_settings()
        # By object, since a new thread may get the id of one that has ended.
        self._threads = weakref.WeakSet(threading.enumerate())
        self._children = set(_children())
        self._files = set(os.listdir("/proc/self/fd"))
        self._memory_mb = _own_memory_mb()
        self._streams = {number: os.dup(number) for number in (0, 1, 2) if _is_open(number)}
        # So that collections after trials skip the modules, which are never freed. There is no collection
        # before it: that would take 0.1 s of the first trial's start and free next to nothing.
        gc.freeze()

    def restore(self, own_package: str = "") -> list[str]:
        """Restore everything but memory; return what could not be restored.

        Args:
            own_package: the training function's package, which the next trial must import again.
        """
        self._restore_streams()
        faulthandler.cancel_dump_traceback_later()
        for child in multiprocessing.active_children():
            # As Python does at its end. A data loader that is collected with its queues waits 5 s for each.
            if child.daemon:
                child.terminate()
        changed = {name for name, _ in self._horovod ^ horovod_settings()}
        problems = [f"{name} was set, which Horovod reads once per process" for name in sorted(changed)]
        # A closed stream cannot be reopened, and the next trial's first print() would raise.
        problems += [f"sys.{name} was closed" for name in unusable_streams()]
        torch = sys.modules.get("torch")
        if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            problems.append("torch.distributed is still initialised")
        more_stay, not_forgotten = self._imports.forget(own_package)
        problems += not_forgotten + self.environment.restore() + self._settings.restore()
        problems += self._watch.restore()
        reseed()
        # `typing` keeps the classes of annotations.
        for clear_cache in typing._cleanups:  # type: ignore[attr-defined]
            clear_cache()
        problems += forget_classes()
        gc.collect()
        if more_stay:
            gc.freeze()
        # After the collection, since collected objects may end their threads and processes.
        return problems + self._threads_left() + self._children_left() + self._files_left()

    def memory_left(self) -> list[str]:
        """Free cached memory; return what is still held. Call it after the backend has released its world."""
        problems = _gpu_memory_left()
        release_freed_memory()
        torch = sys.modules.get("torch")
        on_gpu = torch is not None and torch.cuda.is_initialized()
        more = _own_memory_mb() - self._memory_mb
        if more > (MAX_MEMORY_LEFT_CUDA_MB if on_gpu else MAX_MEMORY_LEFT_MB):
            problems.append(f"{more} MB more memory was in use than before the first trial")
        return problems

    def _restore_streams(self) -> None:
        for number, kept in self._streams.items():
            if not _is_open(number) or not os.path.sameopenfile(number, kept):
                os.dup2(kept, number)

    def _threads_left(self) -> list[str]:
        end = time.monotonic() + EXIT_TIMEOUT_S
        while True:
            left = [
                thread
                for thread in threading.enumerate()
                if thread not in self._threads
                and thread is not threading.current_thread()
                and not _may_stay(thread)
            ]
            if not left or time.monotonic() > end:
                return [f"the thread {thread.name!r} still runs" for thread in left]
            left[0].join(timeout=0.02)

    def _children_left(self) -> list[str]:
        """Kill the processes that the trial left running; return one problem per process."""
        _end_resource_tracker()
        left = []
        for pid in set(_children()) - self._children:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.append(psutil.Process(pid))
        if not left:
            return []
        psutil.wait_procs(left, timeout=EXIT_TIMEOUT_S)
        running = [process for process in left if process.is_running()]
        problems = [f"the child process {each.pid} still ran" for each in running]
        family = []
        for each in running:
            with contextlib.suppress(psutil.NoSuchProcess):
                family += [each, *each.children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(family, timeout=EXIT_TIMEOUT_S)
        return problems

    def _files_left(self) -> list[str]:
        more = set(os.listdir("/proc/self/fd")) - self._files
        problems = [f"{len(more)} files were left open"] if len(more) > MAX_FILES_LEFT else []
        return problems + (["a file is still locked"] if any(map(_is_locked, more)) else [])


def _gpu_memory_left() -> list[str]:
    """Free the cached GPU memory; return what is still held."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return []
    cuda = torch.cuda
    # cuBLAS's workspaces: 65 MB per stream on an H100.
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
    cuda.empty_cache()
    problems = []
    for device in range(cuda.device_count()):
        held = cuda.memory_allocated(device)
        if held > MAX_GPU_MEMORY_LEFT * cuda.get_device_properties(device).total_memory:
            problems.append(f"{held} bytes of memory of GPU {device} are still held")
        cuda.reset_peak_memory_stats(device)
    cuda.manual_seed_all(torch.initial_seed())
    return problems


def _own_memory_mb() -> int:
    """Return this process's anonymous memory, which loading a library hardly increases."""
    (memory,) = process_status("self", "RssAnon")
    return int(memory.split()[0]) >> 10


def _is_open(number: int) -> bool:
    return os.path.lexists(f"/proc/self/fd/{number}")


def _may_stay(thread: threading.Thread) -> bool:
    # Ray runs actor methods in threads that Python treats as dummy threads, and starts import and log
    # threads. tqdm's monitor thread runs until the process ends.
    ours = ("ray_", "ray.", "AsyncIO", "tqdm_monitor")
    return isinstance(thread, threading._DummyThread) or thread.name.startswith(ours)


def _children() -> list[int]:
    """Return the pids of this process's children."""
    pids = []
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/children") as file:
                pids += [int(pid) for pid in file.read().split()]
        except FileNotFoundError:
            if not os.path.exists("/proc/thread-self/children"):
                # A kernel without CONFIG_PROC_CHILDREN: psutil has to read every process of the host.
                return [child.pid for child in psutil.Process().children()]
    return pids


def _end_resource_tracker() -> None:
    """End multiprocessing's resource tracker, so that it removes the shared memory that the trial left."""
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        os.close(tracker._fd)
        tracker._fd = tracker._pid = None


def _is_locked(descriptor: str) -> bool:
    try:
        with open(f"/proc/self/fdinfo/{descriptor}") as file:
            return "lock:" in file.read()
    except FileNotFoundError:  # that of listdir itself
        return False
