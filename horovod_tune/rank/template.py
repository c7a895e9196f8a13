"""The template: a fresh Python that has imported what ranks need, one per host and search, and forks ranks.

It has one Python thread, no device, no code of the training function and no connection to Ray. The first
training actor that needs it starts it; others connect. It ends when the last of them has gone, and before
that everything below the ranks of an actor that has gone.

A request has no content but the descriptors that the rank inherits. Nothing here is unpickled but the
settings, which come from the actor that started this process, through a pipe that only the two have.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pickle
import selectors
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import psutil

from horovod_tune.channel.framing import peer_user
from horovod_tune.rank.allocator import keep_freed_memory
from horovod_tune.rank.rank_start import RankStart

# The Python program of a template and, with "rank" as argument, of a rank that cannot be forked.
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.buffer.readline()); "
    "from horovod_tune.rank import template; template.boot()"
)
TEMPLATE_NAME = "horovod_tune_template"
# Set in every process below a template, and in no other, to a random token.
TEMPLATE_VARIABLE = "HOROVOD_TUNE_TEMPLATE"
# The most bytes of one message in either direction.
MESSAGE_BYTES = 1 << 16
# How long a template waits for the actor that started it to connect.
FIRST_CONNECTION_TIMEOUT_S = 60.0
# How long what an ended actor's ranks leave may take to end, once killed.
EXIT_TIMEOUT_S = 5.0
# How long a template must be idle before it imports what only some functions use.
IDLE_S = 1.0
# Imported then, since `ray.tune.Checkpoint` takes half a second: trials that use checkpoints need it.
_LATER = ("ray.tune",)
_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36
_CUDA_ERROR_NOT_INITIALIZED = 3
_TPU_DEVICES = ("/dev/accel", "/dev/vfio")


@dataclass(frozen=True)
class Settings:
    """What a template is started with.

    Attributes:
        listener: the descriptor of the socket on which it accepts the actors of its host.
        path: that socket's file.
        make_backend: makes the ranks' `RankBackend`; pickled by reference.
        preload: the modules that the user wants imported.
    """

    listener: int
    path: str
    make_backend: Callable[[], Any]
    preload: tuple[str, ...] = ()


def prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def boot() -> NoReturn:
    """Run this process: a template, or the rank that one has forked, which ends as a Python program does."""
    gc.disable()  # until all is imported: collections take a quarter of that time, and find 1 MB
    if sys.argv[1:] == ["rank"]:
        start = _boot_rank()
    else:
        settings: Settings = pickle.load(sys.stdin.buffer)
        if os.fork():  # Ray kills an actor's children when the actor ends, but other actors use the template
            os._exit(0)
        os.setsid()
        start = Template(settings).serve()
    from horovod_tune.rank import process

    process.run(start)


def import_all(make_backend: Callable[[], Any], preload: Sequence[str]) -> tuple[Any, str]:
    """Import what ranks need; return the backend, and why this process must not fork, or an empty text.

    Raises:
        ImportError: a module of ``preload`` cannot be imported. The message names it.
    """
    from horovod_tune.rank import process  # noqa: F401 - what `boot` runs
    from horovod_tune.ray_compat import rank_connection, tune_session

    tune_session.prepare_rank_process()
    rank_connection.prepare_process()
    backend = make_backend()
    problem = ""
    with contextlib.suppress(Exception):  # the rank loads it again, and reports the error
        backend.load()
        problem = unclean()
    if "torch" in sys.modules:
        with contextlib.suppress(Exception):  # torch's optimizers import it, which takes a second or more
            importlib.import_module("torch._dynamo")
    for name in preload:
        try:
            importlib.import_module(name)
        except BaseException as error:  # any, also SystemExit: the module is the user's choice
            text = "".join(traceback.format_exception_only(error)).strip()
            raise ImportError(f"the module {name!r} of preload= cannot be imported: {text}") from error
        if not problem and (found := unclean() or _shared_ids()):
            problem = f"the import of {name} {found}"
    return backend, problem


def _shared_ids() -> str:
    from horovod_tune.ray_compat import rank_connection

    return "has drawn ids of Ray's, which ranks would draw again" if rank_connection.forks_share_ids() else ""


def unclean() -> str:
    """Return what in this process a fork would not survive, as the end of a sentence; empty if nothing."""
    # Not by their names only: `threading` does not know all, and keeps some that have ended.
    if len(sys._current_frames()) > 1:
        threads = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
        return f"has started a thread ({', '.join(threads) or 'of another kind'})"
    if _cuda_is_started():
        return "has started CUDA"
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{entry}")
            if target.startswith(_TPU_DEVICES):
                return f"has opened {target}"
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return "has connected to Ray"
    return ""


def _cuda_is_started() -> bool:
    """Ask CUDA's driver, since libraries may start it without torch; False if it is not loaded."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return False
    count = ctypes.c_int()
    status = driver.cuDeviceGetCount(ctypes.byref(count))
    return bool(status != _CUDA_ERROR_NOT_INITIALIZED)


class Template:
    """Forks a rank per request, and reports how ranks have ended."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._listener = socket.socket(fileno=settings.listener)
        self._listener.setblocking(False)
        self._listener.set_inheritable(False)  # by ranks that are new programs
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        # By pid: the connection of the actor whose rank it is.
        self._ranks: dict[int, socket.socket] = {}
        self._connections: list[socket.socket] = []
        self._backend: Any = None
        # Why ranks start as new programs instead of forks; empty if they are forked.
        self._problem = ""
        self._later = list(_LATER)
        self._wakeup_r, self._wakeup_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # The exit statuses of ranks below which something still runs.
        self._ended: dict[int, int] = {}
        # Processes that imports have started.
        self._own_children: set[int] = set()
        self._shared: dict[str, int] = {}

    def serve(self) -> RankStart:
        """Serve actors until the last one has gone, and end the process; return only in a rank."""
        prctl(_PR_SET_NAME, TEMPLATE_NAME[:15].encode())
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _read_nothing()
        # `torch.cuda.is_available()` would start CUDA, which does not survive a fork.
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
        keep_freed_memory()  # of ranks, which inherit the allocator's settings
        # Since 3.12 Python warns of threads that C libraries keep, which survive a fork.
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork.*")
        error = ""
        try:
            self._backend, self._problem = import_all(self._settings.make_backend, self._settings.preload)
        except ImportError as failed:
            error = str(failed)
        if self._problem:
            print(f"horovod_tune: {self._problem}: each rank starts as a new Python program", flush=True)
        self._own_children = children()
        _end_imports()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup_w)
        self._selector.register(self._wakeup_r, selectors.EVENT_READ)
        greeting = {"kind": "failed", "error": error} if error else self._introduction()
        return self._serve(json.dumps(greeting).encode())

    def _introduction(self) -> dict[str, Any]:
        return {"kind": "ready", "pid": os.getpid(), "token": os.environ[TEMPLATE_VARIABLE]}

    def _serve(self, greeting: bytes) -> RankStart:
        timeout_s: float | None = FIRST_CONNECTION_TIMEOUT_S
        while True:
            found = self._selector.select(timeout_s)
            if not found and not self._connections:
                os._exit(1)  # the actor that started this process has ended
            timeout_s = IDLE_S if self._later and self._ranks else None
            if not found:
                self._import_later()
            for key, _ in found:
                if key.fileobj is self._listener:
                    self._accept(greeting)
                elif key.fileobj == self._wakeup_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wakeup_r, 4096)
                elif (start := self._receive(key.fileobj)) is not None:
                    return start
            self._reap()

    def _accept(self, greeting: bytes) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                if peer_user(connection) != os.geteuid():
                    connection.close()
                    continue
                self._connections.append(connection)
                self._selector.register(connection, selectors.EVENT_READ)
                _send(connection, greeting)

    def _receive(self, connection: Any) -> RankStart | None:
        """Do what an actor requests; return what a new rank begins with, in the rank."""
        data, descriptors = b"", list[int]()
        with contextlib.suppress(OSError):
            data, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 4)
        if not data:
            self._drop(connection)
            return None
        match _parsed(data), descriptors:
            case {"kind": "share", "name": str() as name}, [] | [_]:
                self._share(connection, name, descriptors)
                return None
            case {"kind": "start"}, [_, _, _]:
                start = self._start_rank(connection, descriptors)
            case _:  # another process of this user, which is no actor of ours
                start = None
                self._drop(connection)
        if start is None:
            for each in descriptors:
                os.close(each)
        return start

    def _share(self, connection: socket.socket, name: str, descriptors: Sequence[int]) -> None:
        """Keep a file in memory for all ranks of the host; reply with its path, empty if there is none."""
        for each in descriptors:
            if self._shared.setdefault(name, each) != each:  # another actor was faster
                os.close(each)
        path = f"/proc/{os.getpid()}/fd/{self._shared[name]}" if name in self._shared else ""
        _send(connection, json.dumps({"kind": "shared", "path": path}).encode())

    def _start_rank(self, connection: Any, descriptors: list[int]) -> RankStart | None:
        own, problem = os.getpid(), self._problem or unclean()
        pid = os.fork()
        if pid:
            self._ranks[pid] = connection
            _send(connection, json.dumps({"kind": "started", "pid": pid}).encode())
            return None
        _become_rank(own)
        if problem:
            _exec_rank(self._settings, descriptors)
        signal.set_wakeup_fd(-1)
        self._selector.close()
        for each in (self._listener, *self._connections):
            each.close()
        os.close(self._wakeup_r)
        os.close(self._wakeup_w)
        return _start_with(descriptors, self._backend)

    def _drop(self, connection: socket.socket) -> None:
        """End the ranks of an actor that has gone; with the last actor, end this process."""
        self._selector.unregister(connection)
        self._connections.remove(connection)
        for pid in [pid for pid, owner in self._ranks.items() if owner is connection]:
            _kill(pid)
        connection.close()
        if not self._connections:
            # An actor that connects at this moment is disconnected, and starts another template, since it
            # finds no file then.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._settings.path)
            end_s = time.monotonic() + EXIT_TIMEOUT_S
            while self._ranks and time.monotonic() < end_s:
                self._reap()
                time.sleep(0.01)
            os._exit(0)

    def _reap(self) -> None:
        """Report the ranks that have ended, once everything below them has ended too."""
        with contextlib.suppress(ChildProcessError):
            while (reaped := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = reaped
                if pid in self._ranks:
                    self._ended[pid] = os.waitstatus_to_exitcode(status)
                    _kill(pid, group_only=True)
        if not self._ended:
            return
        # A rank is the parent of everything that it leaves behind, so with its end this process becomes that.
        strays = children() - self._own_children - (self._ranks.keys() - self._ended.keys())
        for pid in strays:
            _kill(pid)
        if strays:
            return  # SIGCHLD wakes this process up again
        for pid, status in self._ended.items():
            _send(self._ranks.pop(pid), json.dumps({"kind": "ended", "pid": pid, "status": status}).encode())
        self._ended.clear()

    def _import_later(self) -> None:
        gc.disable()
        while self._later:
            name = self._later.pop()
            with contextlib.suppress(Exception):  # a rank that needs it raises the error
                importlib.import_module(name)
            if found := unclean() or _shared_ids():
                self._problem = f"the import of {name} {found}"
        _end_imports()


def _end_imports() -> None:
    """Leave what imports have made, such as a temporary directory, to this process: ranks share it."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    gc.freeze()  # so that collections in ranks do not copy the template's pages
    gc.enable()


def _become_rank(template: int) -> None:
    """Make this process, which has just been forked, a session of its own that ends with its template."""
    prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != template:
        os._exit(1)
    os.setsid()
    # Processes that it leaves behind stay below it, so that they can be ended with it.
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    prctl(_PR_SET_NAME, b"horovod_rank")
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _exec_rank(settings: Settings, descriptors: Sequence[int]) -> NoReturn:
    """Replace this process with a new Python that imports everything itself."""
    contents = json.dumps(sys.path).encode() + b"\n"
    contents += pickle.dumps((settings.make_backend, settings.preload, list(descriptors)))
    given = os.memfd_create("horovod_tune_rank")  # closed by exec, unlike its copy
    os.write(given, contents)
    os.lseek(given, 0, os.SEEK_SET)
    os.dup2(given, 0)
    for each in descriptors:
        os.set_inheritable(each, True)
    os.execv(sys.executable, [sys.executable, "-c", BOOT, "rank"])


def _boot_rank() -> RankStart:
    make_backend, preload, descriptors = pickle.load(sys.stdin.buffer)
    _read_nothing()
    for each in descriptors:
        os.set_inheritable(each, False)
    keep_freed_memory()
    backend, _ = import_all(make_backend, preload)
    gc.enable()
    return _start_with(descriptors, backend)


def _start_with(descriptors: Sequence[int], backend: Any) -> RankStart:
    control, output, channel = descriptors
    return RankStart(control, output, channel, backend)


def _read_nothing() -> None:
    """Make standard input empty, as it is in a program that `torchrun` starts on another machine."""
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - open as long as the process
    sys.argv = [TEMPLATE_NAME]


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def _send(connection: socket.socket, data: bytes) -> None:
    # The actor has ended, which `_receive` finds out, or is suspended, for which the others must not wait.
    with contextlib.suppress(OSError):
        connection.send(data, socket.MSG_DONTWAIT)


def _kill(pid: int, *, group_only: bool = False) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    if not group_only:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def children() -> set[int]:
    """Return the pids of this process's children."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return set(map(int, file.read().split()))
    except FileNotFoundError:  # the kernel was built without it; this takes ten times as long
        return {each.pid for each in psutil.Process().children()}
