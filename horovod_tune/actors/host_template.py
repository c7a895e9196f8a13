"""Runs in each training actor: its connection to the template of its host, `rank/template.py`."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import pickle
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from horovod_tune.channel.framing import peer_user
from horovod_tune.errors import StartFailed
from horovod_tune.rank.template import (
    BOOT,
    MESSAGE_BYTES,
    TEMPLATE_NAME,
    TEMPLATE_VARIABLE,
    Settings,
)

# How long a template may take to import, and then to fork a rank.
READY_TIMEOUT_S = 600.0
REPLY_TIMEOUT_S = 60.0
# How often an actor whose template ends at this moment tries another one.
ATTEMPTS = 5
# Variables that differ between the actors of a search. A rank gets those of its own actor.
_OF_AN_ACTOR = ("CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS", "RAY_JOB_ID", "RAY_RAYLET_PID")


class HostTemplate:
    """One actor's connection to a template. The template ends the actor's ranks when it is closed.

    Args:
        folder: the private folder of this host's session, in which actors that need the same template find
            it; None if there is none, and the actor has a template of its own.
        make_backend, preload: as in `Settings`.

    Raises:
        StartFailed: no template could be started.
    """

    def __init__(
        self, folder: Path | None, make_backend: Callable[[], Any], preload: tuple[str, ...], job: str
    ) -> None:
        self._own_folder = None if folder else tempfile.TemporaryDirectory(prefix="horovod_tune_")
        self._folder = folder or Path(self._own_folder.name)  # type: ignore[union-attr]
        self._make_backend, self._preload = make_backend, preload
        shared = {name: value for name, value in os.environ.items() if name not in _OF_AN_ACTOR}
        key = [job, sys.path, os.getcwd(), sorted(shared.items()), pickle.dumps(make_backend).hex(), preload]
        self._name = f"template_{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"
        self._environment = shared
        self._calling = threading.Lock()
        self._notices: deque[dict[str, Any]] = deque()
        self.pid, self.token = 0, ""
        self._connect()

    def fileno(self) -> int:
        return self._connection.fileno()

    def _connect(self) -> None:
        for _ in range(ATTEMPTS):
            self._connection = self._connect_or_start()
            greeting = self._receive(READY_TIMEOUT_S)
            match greeting:
                case {"kind": "ready", "pid": pid, "token": token}:
                    self.pid, self.token = pid, token
                    return
                case {"kind": "failed", "error": error}:
                    self.close()
                    raise StartFailed(error)
            self._connection.close()  # it was ending: its last actor had gone
        raise StartFailed(f"the process that forks ranks ended {ATTEMPTS} times before it was ready")

    @contextlib.contextmanager
    def _locked_folder(self) -> Iterator[str]:
        """Keep other actors from starting templates; yield the path of this one's socket."""
        directory = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            # A socket's path is limited to 108 bytes, and a session's may be longer.
            yield f"/proc/self/fd/{directory}/{self._name}"
        finally:
            os.close(directory)

    def _connect_or_start(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with self._locked_folder() as path:
            try:
                connection.connect(path)
            except (FileNotFoundError, ConnectionRefusedError):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                    listener.bind(path)
                    os.chmod(path, 0o600)
                    listener.listen(1024)
                    self._start(listener.fileno())
                connection.connect(path)
        if peer_user(connection) != os.geteuid():
            connection.close()
            raise StartFailed(f"another user listens at {self._folder / self._name}")
        return connection

    def _start(self, listener: int) -> None:
        settings = Settings(listener, str(self._folder / self._name), self._make_backend, self._preload)
        starter = subprocess.Popen(
            [sys.executable, "-c", BOOT, TEMPLATE_NAME],
            stdin=subprocess.PIPE,
            env={**self._environment, TEMPLATE_VARIABLE: secrets.token_hex(16)},
            pass_fds=[listener],
        )
        given = json.dumps(sys.path).encode() + b"\n" + pickle.dumps(settings)
        with contextlib.suppress(BrokenPipeError):
            starter.communicate(given, timeout=REPLY_TIMEOUT_S)
        if starter.returncode:
            raise StartFailed(f"the process that forks ranks ended with status {starter.returncode}")

    def start_rank(self, descriptors: list[int]) -> int:
        """Fork a rank, which inherits ``descriptors``; return its pid.

        Raises:
            StartFailed: the template has ended, or does not reply.
        """
        pid: int = self._call({"kind": "start"}, descriptors, "started")["pid"]
        return pid

    def share(self, name: str, write: Callable[[int], None]) -> str:
        """Return the path of a file in memory that all ranks of this host share; the first call writes it."""
        path: str = self._call({"kind": "share", "name": name}, [], "shared")["path"]
        if not path:
            file = os.memfd_create("horovod_tune_parameters", os.MFD_CLOEXEC)
            try:
                write(file)
                path = self._call({"kind": "share", "name": name}, [file], "shared")["path"]
            finally:
                os.close(file)
        return path

    def _call(self, request: Mapping[str, Any], descriptors: list[int], reply: str) -> dict[str, Any]:
        end_s = time.monotonic() + REPLY_TIMEOUT_S
        with self._calling:
            try:
                socket.send_fds(self._connection, [json.dumps(request).encode()], descriptors)
                while (message := self._receive(end_s - time.monotonic())) is not None:
                    if message["kind"] == reply:
                        return message
                    self._notices.append(message)
            except OSError as error:
                raise StartFailed(f"the process that forks ranks ({self.pid}) has ended: {error}") from error
        raise StartFailed(f"the process that forks ranks ({self.pid}) has ended")

    def _receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next message; None if the template has ended."""
        self._connection.settimeout(max(0.001, timeout_s))
        try:
            data = self._connection.recv(MESSAGE_BYTES)
        except ConnectionError:
            return None
        except TimeoutError:
            raise StartFailed(
                f"the process that forks ranks ({self.pid or 'still importing'}) did not reply within "
                f"{timeout_s:g} s"
            ) from None
        message: dict[str, Any] | None = json.loads(data) if data else None
        return message

    def notices(self) -> Iterator[dict[str, Any]]:
        """Yield what the template has reported since the last call; ``{"kind": "gone"}`` if it has ended."""
        with self._calling:
            while self._notices:
                yield self._notices.popleft()
            self._connection.settimeout(0)
            while True:
                try:
                    data = self._connection.recv(MESSAGE_BYTES)
                except BlockingIOError:
                    return
                except OSError:
                    data = b""
                yield json.loads(data) if data else {"kind": "gone"}
                if not data:
                    return

    def remove_file(self) -> None:
        """Remove the file of a template that was killed, unless another one has replaced it."""
        with self._locked_folder() as path, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as attempt:
            try:
                attempt.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)
            except FileNotFoundError:
                return

    def close(self) -> None:
        self._connection.close()
        if self._own_folder is not None:
            self._own_folder.cleanup()
