"""A script that loads torch once and forks Ray's worker processes: `server.py LISTENER PATH HOW RAYLET`.

LISTENER is the file descriptor of a socket that listens, PATH its name in the file system, and RAYLET the pid
of Ray's daemon, without which there is nothing to do. Where HOW is "exec", nothing is loaded and the children
start a new Python. So do those that would draw the same ids as other ranks (`drawn_by_a_child`).

The first ranks do not wait for Ray Tune, which the module of a training function usually imports: a second
for each rank. It is loaded some seconds later, in a second in which nobody asks, for those that are forked
then: in the place of lost ranks and for trials that are resized.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import gc
import importlib
import json
import math
import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

LOOKS_EVERY_S = 1.0
# How long a server without children stays, for the next ones.
IDLE_S = 10.0
# How long after its first child the server loads what only later ones gain from. It takes a second of a core:
# of forty short trials in five seconds it would take a fifth.
LOADS_MORE_AFTER_S = 10.0
# How long a client may take to send its request; others wait meanwhile.
REQUEST_S = 5.0
# How long a child may take to draw an id, which is a matter of microseconds.
DRAWS_S = 10.0
# How many children's ends stay noted.
NOTES = 256
LENGTH = struct.Struct("!Q")
PID = struct.Struct("!i")
# Linux allows a new process 6 MB of arguments and environment.
MAX_REQUEST_BYTES = 64 << 20
_STREAMS = 3
_PROGRAMS_FOLDER = "/dev/null/the folder of the program to come"


class Server:
    """Forks a child for each request. `serve` returns in the children, with what they are to run.

    ``when_quiet`` is called once, in a second in which nobody asks for a child, ``quiet_after_s`` after the
    first one at the earliest.
    """

    def __init__(
        self,
        listener: socket.socket,
        path: str,
        raylet: int,
        when_quiet: Callable[[], None] = lambda: None,
        quiet_after_s: float = LOADS_MORE_AFTER_S,
    ) -> None:
        self._when_quiet: Callable[[], None] | None = when_quiet
        self._quiet_after_s, self._first_at = quiet_after_s, math.inf
        self._listener = listener
        self._path = path
        self._raylet = raylet
        self._children: set[int] = set()
        self._notes: list[str] = []
        self._busy_at = time.monotonic()
        signal.signal(signal.SIGCHLD, self._bury)

    def serve(self) -> dict[str, Any] | None:
        """Serve until there is nothing to do (None), or this is a child: then its request."""
        while True:
            if select.select([self._listener], [], [], LOOKS_EVERY_S)[0]:
                connection, _ = self._listener.accept()
                with connection, contextlib.suppress(OSError, ValueError):
                    request = self._answer(connection)
                    if request is not None:
                        return request
            elif (self._is_idle() or not _is_there(self._raylet)) and self._leaves():
                return None
            elif self._children and self._when_quiet is not None:
                self._first_at = min(self._first_at, time.monotonic())
                if time.monotonic() - self._first_at >= self._quiet_after_s:
                    self._when_quiet()
                    self._when_quiet = None

    def _is_idle(self) -> bool:
        if self._children:
            self._busy_at = time.monotonic()
        return time.monotonic() - self._busy_at > IDLE_S

    def _leaves(self) -> bool:
        """Take the name away, unless a client is just coming in."""
        try:
            with open(f"{self._path}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if select.select([self._listener], [], [], 0)[0]:
                    return False
                os.unlink(self._path)
        except BlockingIOError:
            return False
        except FileNotFoundError:  # somebody has cleared Ray's session away
            return True
        return True

    def _answer(self, connection: socket.socket) -> dict[str, Any] | None:
        connection.settimeout(REQUEST_S)
        request, streams = _receive(connection)
        try:
            if len(streams) != _STREAMS:
                return None
            if select.select([connection], [], [], 0)[0]:
                return None  # the client has given up, and runs the program itself
            if not _is_there(self._raylet):
                return None  # nobody is left for whom the program could work
            child = self._fork()
            if child == 0:
                for number, stream in enumerate(streams):
                    os.dup2(stream, number)
                self._listener.close()
                return request
            self._busy_at = time.monotonic()
            connection.sendall(PID.pack(child))
            return None
        finally:
            for stream in streams:
                os.close(stream)

    def _fork(self) -> int:
        # A child that ends at once is not to be buried before it is known.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        try:
            child = os.fork()
            if child:
                self._children.add(child)
            else:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.setpgid(0, 0)  # Ray ends a worker with its process group
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        return child

    def _bury(self, *_: Any) -> None:
        # At once, since a process that ended is looked for by those who wait for its end.
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                # Status 0 too: nobody else knows that a rank called os._exit(0). Not of `drawn_by_a_child`.
                if ended[0] in self._children:
                    self._children.remove(ended[0])
                    self._note_death(*ended)

    def _note_death(self, child: int, status: int) -> None:
        # For the coordinator, which is told by Ray that the process is gone, and by nobody else why.
        note = os.path.join(os.path.dirname(self._path), f"{child}.death")
        self._notes.append(note)
        old = [self._notes.pop(0)] if len(self._notes) > NOTES else []
        with contextlib.suppress(OSError):  # Ray's session is cleared away, or its disk is full
            with open(f"{note}.part", "w") as file:
                file.write(f"{os.waitstatus_to_exitcode(status)} {time.clock_gettime(time.CLOCK_BOOTTIME)}")
            os.rename(f"{note}.part", note)
        for each in old:
            with contextlib.suppress(FileNotFoundError):  # it has been read
                os.unlink(each)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a request and the file descriptors that came with it.

    Raises:
        OSError: the client went, or took longer than REQUEST_S between two pieces.
        ValueError: it is not a request.
    """
    head, ancillary, _, _ = connection.recvmsg(LENGTH.size, socket.CMSG_SPACE(_STREAMS * PID.size))
    streams = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            streams.frombytes(data[: len(data) - len(data) % streams.itemsize])
    try:
        if len(head) < LENGTH.size or not (0 < (missing := LENGTH.unpack(head)[0]) <= MAX_REQUEST_BYTES):
            raise ValueError("not a request")
        body = bytearray()
        while missing > len(body):
            piece = connection.recv(min(1 << 20, missing - len(body)))
            if not piece:
                raise ConnectionResetError("the client went")
            body += piece
        try:
            request = json.loads(body)
        except RecursionError as error:
            raise ValueError("not a request") from error
        if not isinstance(request, dict) or set(request) != {"command", "environment", "directory"}:
            raise ValueError("not a request")
    except (OSError, ValueError):
        for stream in streams:
            os.close(stream)
        raise
    return request, list(streams)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's, and there
        return True
    return True


def load(*modules: str) -> dict[str, str]:
    """Import modules that ranks need; return the environment variables that this has set."""
    before = dict(os.environ)
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.enable()
    gc.freeze()  # the children need not look at it, nor copy its pages for looking
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def load_more() -> dict[str, str]:
    """Import Ray Tune and the training actor, if that is possible; return what `load` does."""
    try:
        from horovod_tune import ray_compat

        if not ray_compat.draw_actor_class_ids_from_the_system():
            return {}
        return load("ray.tune", "horovod_tune.gloo.training_actor")
    except Exception:  # whatever an import raises: a rank that does the same says so
        traceback.print_exc()
        return {}


def draw() -> bytes:
    """Return an id that Ray draws."""
    from ray import ObjectID

    drawn: bytes = ObjectID.from_random().binary()
    return drawn


def drawn_by_a_child() -> bytes:
    """Return the id that a child draws first. If another one draws the same, all of them draw the same ids.

    Ray's generator is seeded by its first use, and a fork copies it. What a process loads must not use it.
    Empty where the child could not draw one in DRAWS_S.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, draw())
        except Exception:  # any: the parent sees that nothing came
            traceback.print_exc()
        os._exit(0)
    os.close(writer)
    if not select.select([reader], [], [], DRAWS_S)[0]:
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reader, "rb") as drawn:
        return drawn.read()


def _reseed() -> None:
    # Python's own generator takes new numbers after a fork, those of NumPy and torch do not.
    import numpy.random
    import torch

    numpy.random.seed()
    torch.default_generator.seed()


def leave_with(raylet: int) -> None:
    """End this process as soon as Ray's daemon has ended.

    Ray's worker processes do so too, but not before they have registered with it, for which they wait 60 s.
    """
    try:
        daemon = os.pidfd_open(raylet)
    except ProcessLookupError:
        os._exit(1)
    except (AttributeError, OSError):  # Linux before 5.3
        return

    def watch() -> None:
        select.select([daemon], [], [])
        os._exit(1)

    threading.Thread(target=watch, name="ray_daemon_watch", daemon=True).start()


def run(request: dict[str, Any], of_imports: dict[str, str], raylet: int) -> None:
    """Be the process that Ray wanted to start."""
    leave_with(raylet)
    os.environ.clear()
    os.environ.update({**request["environment"], **of_imports})
    os.chdir(request["directory"])
    _reseed()
    sys.argv[:] = request["command"]
    sys.path[sys.path.index(_PROGRAMS_FOLDER)] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")


def start_anew(request: dict[str, Any]) -> None:
    """Become the process that Ray wanted to start, with nothing of this one."""
    os.chdir(request["directory"])
    os.execve(sys.executable, [sys.executable, *request["command"]], request["environment"])


def main() -> None:
    number, path, how, raylet = sys.argv[1:]
    listener = socket.socket(fileno=int(number))
    listener.set_inheritable(False)
    if how != "fork":
        request = Server(listener, path, int(raylet)).serve()
        if request is not None:
            start_anew(request)
        return
    sys.path[0] = _PROGRAMS_FOLDER  # before what Ray puts in front of it
    of_imports = load("numpy", "psutil", "ray", "torch")
    of_another = drawn_by_a_child()

    def when_quiet() -> None:
        nonlocal of_another
        of_imports.update(load_more())
        of_another = drawn_by_a_child()

    request = Server(listener, path, int(raylet), when_quiet).serve()
    if request is None:
        return
    if of_another in (b"", draw()):
        message = "horovod_tune: this process is started anew, since Ray's ids may be those of others"
        print(message, file=sys.stderr, flush=True)
        start_anew(request)
    run(request, of_imports, int(raylet))


if __name__ == "__main__":
    main()
