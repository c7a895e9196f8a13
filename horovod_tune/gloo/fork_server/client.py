"""A script that Ray runs as if it were ``python``: `client.py DIRECTORY HOW THREADS PROGRAM ARGUMENTS…`.

Lets the fork server run PROGRAM, or runs it itself. `client.py DIRECTORY HOW THREADS --start RAYLET` only
starts the server where there is none yet. HOW is "fork", or "exec" for children that start a new Python.
THREADS is what libraries take for OMP_NUM_THREADS if that is not set.
Only Python's own library, and little of that: this is the time that a new rank takes.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import json
import os
import socket
import stat
import struct
import sys

# How long loading torch may take; Ray gives up on a process after 60 s.
SERVER_ANSWERS_S = 45.0
LENGTH = struct.Struct("!Q")
PID = struct.Struct("!i")
_OF_THE_SHELL = {"_", "SHLVL", "PWD", "OLDPWD"}


def fork(directory: str, how: str, threads: str, command: list[str]) -> int:
    """Let the server of this environment run ``command``; return the pid of its child.

    Raises:
        OSError: there is no server and none could be started, or it did not answer.
    """
    environment = dict(os.environ)
    with connect(directory, how, threads, raylet=os.getppid()) as connection:
        request = {"command": command, "environment": environment, "directory": os.getcwd()}
        body = json.dumps(request).encode()
        streams = array.array("i", [0, 1, 2])
        connection.sendmsg([LENGTH.pack(len(body))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
        connection.sendall(body)
        answer = connection.recv(PID.size)
    if len(answer) < PID.size:
        raise OSError(f"the fork server ended without an answer, see the .log files in {directory}")
    return PID.unpack(answer)[0]


def connect(directory: str, how: str, threads: str, raylet: int) -> socket.socket:
    """Return a connection to the server of this environment, which is started where there is none.

    Raises:
        OSError: none could be started, or ``directory`` may be entered by others.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(directory, 0o700)  # the coordinator has one on its own host only
    facts = os.lstat(directory)
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
        raise OSError(f"{directory} is not a directory that only this user may enter")
    # What a library reads when it is loaded must be as it would be in a new process: a server for each
    # environment. Ray's job and its daemon are named in it too.
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    known = sorted(item for item in environment.items() if item[0] not in _OF_THE_SHELL)
    name = hashlib.sha256(json.dumps([sys.executable, how, known]).encode()).hexdigest()[:24]
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(SERVER_ANSWERS_S)
    entry = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        # The path of a socket may have 107 bytes, and Ray's are long.
        address = f"/proc/self/fd/{entry}/{name}"
        lock = os.open(f"{directory}/{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                connection.connect(address)
            except (FileNotFoundError, ConnectionRefusedError):
                _start(address, f"{directory}/{name}", environment, raylet, how)
                connection.connect(address)
        finally:
            os.close(lock)
    except OSError:
        connection.close()
        raise
    finally:
        os.close(entry)
    return connection


def _start(address: str, path: str, environment: dict[str, str], raylet: int, how: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of a server that was killed
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(1024)
        if os.fork():
            return
        os.setsid()
        log = os.open(f"{path}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for stream, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(source, stream)
        os.set_inheritable(listener.fileno(), True)
        server = os.path.join(os.path.dirname(os.path.abspath(__file__)), "server.py")
        arguments = [str(listener.fileno()), path, how, str(raylet)]
        os.execve(sys.executable, [sys.executable, server, *arguments], environment)


def main() -> None:
    directory, how, threads, *command = sys.argv[1:]
    if command[0] == "--start":
        connect(directory, how, threads, raylet=int(command[1])).close()
        return
    raylet = os.getppid()
    try:
        fork(directory, how, threads, command)
    except OSError as error:
        if os.getppid() != raylet:
            return  # Ray's daemon has ended meanwhile: nobody waits for this process
        print(f"horovod_tune: this process is not forked but started anew: {error!r}", file=sys.stderr)
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *command])


if __name__ == "__main__":
    main()
