"""Runs pip and the compilers under it, and ends them all when the build ends."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from horovod_tune.horovod_build import BuildError, build_progress


def run_compiler(
    command: Sequence[str], environment: dict[str, str], what: str, log: Path, lock: int
) -> None:
    """Run the compile `command` to its end, its output in `log` and its progress on stdout.

    `lock` is the descriptor of the build's lock.

    Raises:
        BuildError: it failed; quotes the first error.
    """
    reporter = build_progress.Reporter(what, sys.stdout)
    with _ends_with_us(), log.open("w") as kept:
        # A session of its own, so that one signal ends make and all its compilers; and the lock's descriptor,
        # so that no second build starts in this folder while a compiler of this one is still alive.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(lock,),
        )
        try:
            for line in _lines(process):
                kept.write(line)
                reporter.line(line) if line else reporter.tick()
            status = process.wait()
        except BaseException:
            _end_session(process)
            reporter.done("interrupted")
            raise
    if status == 0:
        reporter.done("done")
        return
    reporter.done("failed")
    lines = log.read_text(errors="replace").splitlines()
    cause = build_progress.first_error(lines) or "\n".join(lines[-5:])
    cure = "\nThe machine ran out of memory: try --jobs 1." if build_progress.ran_out_of_memory(lines) else ""
    raise BuildError(f"Horovod did not compile. The first error:\n\n{cause}\n{cure}\nThe whole log: {log}")


def _lines(process: subprocess.Popen[bytes]) -> Iterator[str]:
    """Give the process's output line by line, and an empty string for each second without any."""
    assert process.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(timeout=1.0):
                yield ""
                continue
            block = os.read(process.stdout.fileno(), 1 << 16)
            if not block:
                break
            *whole, rest = (rest + block).split(b"\n")
            for line in whole:
                yield line.decode(errors="replace") + "\n"
    if rest:
        yield rest.decode(errors="replace") + "\n"


@contextmanager
def _ends_with_us() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exception, so that the compilers are ended too."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_session(process: subprocess.Popen[bytes]) -> None:
    for number, wait_s in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout=wait_s)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def run_pip(command: Sequence[str]) -> None:
    """Run a pip `command` without showing its output; raise BuildError with its end where it fails."""
    ran = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if ran.returncode != 0:
        last = "\n".join(ran.stdout.strip().splitlines()[-8:])
        raise BuildError(f"{' '.join(command)}\nfailed with exit status {ran.returncode}:\n{last}")
